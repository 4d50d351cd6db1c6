"""Laying out matrices as kernels read them, once at load. `ref.py` has the layout.

Here no backend is chosen: the native version moves the same bytes as the reference, only faster, and is taken wherever it is built.
"""

from collections.abc import Callable

import torch

from kernels import huge_pages
from kernels.packing.ref import PANEL_ROWS, QUAD, all_finite_ref, pack_elements_ref, pack_int4_ref, pack_int8_ref

__all__ = ["PANEL_ROWS", "QUAD", "all_finite", "pack_elements", "pack_int4", "pack_int8"]

try:
    from kernels import _native
except ImportError:  # the reference runs without
    _native = None  # type: ignore[assignment]

_NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}


def pack_int4(pairs: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group_size: int) -> torch.Tensor:
    """Codes two a byte uint8 [N, K / 2] with scales (and minima) [N, groups] of one float type -> uint8 [panels, groups, bytes]."""
    if _native is None:
        return pack_int4_ref(pairs, scale, minimum, group_size)
    return _quantized(_native.pack_int4, pairs, scale, minimum, 2 * pairs.shape[1], group_size)


def pack_int8(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group_size: int) -> torch.Tensor:
    """Codes int8 [N, K] with scales (and minima) [N, groups] of one float type -> uint8 [panels, groups, bytes]."""
    if _native is None:
        return pack_int8_ref(codes, scale, minimum, group_size)
    return _quantized(_native.pack_int8, codes, scale, minimum, codes.shape[1], group_size)


def pack_elements(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] of 1, 2 or 4 bytes an element -> [panels, K, 16], the rows padded with zeros."""
    if _native is None:
        return pack_elements_ref(matrix)
    source, (num_rows, num_cols) = matrix.contiguous(), matrix.shape
    out = torch.empty(-(-num_rows // PANEL_ROWS), num_cols, PANEL_ROWS, dtype=matrix.dtype)
    huge_pages.ask_for(out)
    _native.pack_elements(source.data_ptr(), num_rows, num_cols, matrix.itemsize, out.data_ptr())
    return out


def all_finite(numbers: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite: bfloat16, float16, float32 or e4m3."""
    if _native is None or numbers.dtype not in _NUMBERS:
        return all_finite_ref(numbers)
    source = numbers.contiguous()
    return bool(_native.all_finite(source.data_ptr(), source.numel(), _NUMBERS[source.dtype]))


def _quantized(
    pack: Callable[..., None],
    codes: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    num_cols: int,
    group: int,
) -> torch.Tensor:
    num_rows, num_groups = scale.shape
    numbers = [tensor.contiguous() for tensor in (scale, minimum) if tensor is not None]
    group_bytes = PANEL_ROWS * (group * codes.shape[1] // num_cols + scale.itemsize * len(numbers))
    out = torch.empty(-(-num_rows // PANEL_ROWS), num_groups, group_bytes, dtype=torch.uint8)
    huge_pages.ask_for(out)
    source = codes.contiguous()
    pack(
        source.data_ptr(), numbers[0].data_ptr(), numbers[1].data_ptr() if len(numbers) > 1 else 0, scale.itemsize,
        num_rows, num_cols, group, out.data_ptr(),
    )  # fmt: skip
    return out
