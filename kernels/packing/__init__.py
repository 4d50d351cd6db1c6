"""Laying out matrices as kernels read them, once at load. `ref.py` has the layout.

Here no backend is chosen: the native version moves the same bytes as the reference, only faster, and is taken wherever it is built.
"""

from collections.abc import Callable

import torch

from kernels import huge_pages
from kernels.packing.ref import PANEL_ROWS, QUAD, all_finite_ref, pack_elements_ref, pack_int4_ref, pack_int8_ref

__all__ = [
    "PANEL_ROWS",
    "QUAD",
    "all_finite",
    "elements_shape",
    "pack_elements",
    "pack_int4",
    "pack_int8",
    "quantized_shape",
]

try:
    from kernels import _native
except ImportError:  # the reference runs without
    _native = None  # type: ignore[assignment]

_NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}


def quantized_shape(
    shape: tuple[int, int], group_size: int, bits: int, scale_dtype: torch.dtype, *, has_minimum: bool
) -> tuple[int, int, int]:
    """[panels, groups, bytes] of a packed matrix [N, K]."""
    numbers = scale_dtype.itemsize * (2 if has_minimum else 1)
    return -(-shape[0] // PANEL_ROWS), shape[1] // group_size, PANEL_ROWS * (group_size * bits // 8 + numbers)


def elements_shape(shape: tuple[int, int]) -> tuple[int, int, int]:
    """[panels, K, 16] of a packed matrix [N, K]."""
    return -(-shape[0] // PANEL_ROWS), shape[1], PANEL_ROWS


def pack_int4(
    pairs: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    group_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes two a byte uint8 [N, K / 2] with scales (and minima) [N, groups] of one float type -> uint8 `quantized_shape`, contiguous if it's given."""
    shape = (pairs.shape[0], 2 * pairs.shape[1])
    out = _or_fresh(
        out, quantized_shape(shape, group_size, 4, scale.dtype, has_minimum=minimum is not None), torch.uint8
    )
    if _native is None:
        return out.copy_(pack_int4_ref(pairs, scale, minimum, group_size))
    return _quantized(_native.pack_int4, pairs, scale, minimum, shape, group_size, out)


def pack_int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    group_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes int8 [N, K] with scales (and minima) [N, groups] of one float type -> uint8 `quantized_shape`, contiguous if it's given."""
    shape = (codes.shape[0], codes.shape[1])
    out = _or_fresh(
        out, quantized_shape(shape, group_size, 8, scale.dtype, has_minimum=minimum is not None), torch.uint8
    )
    if _native is None:
        return out.copy_(pack_int8_ref(codes, scale, minimum, group_size))
    return _quantized(_native.pack_int8, codes, scale, minimum, shape, group_size, out)


def pack_elements(matrix: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[N, K] of 1, 2 or 4 bytes an element -> `elements_shape`, contiguous if it's given, the rows padded with zeros."""
    source, (num_rows, num_cols) = matrix.contiguous(), matrix.shape
    out = _or_fresh(out, elements_shape((num_rows, num_cols)), matrix.dtype)
    if _native is None:
        return out.copy_(pack_elements_ref(matrix))
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
    shape: tuple[int, int],
    group: int,
    out: torch.Tensor,
) -> torch.Tensor:
    numbers = [tensor.contiguous() for tensor in (scale, minimum) if tensor is not None]
    source = codes.contiguous()
    pack(
        source.data_ptr(), numbers[0].data_ptr(), numbers[1].data_ptr() if len(numbers) > 1 else 0, scale.itemsize,
        *shape, group, out.data_ptr(),
    )  # fmt: skip
    return out


def _or_fresh(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that's given, or a new one."""
    if out is None:
        out = torch.empty(shape, dtype=dtype)
        huge_pages.ask_for(out)
    assert (tuple(out.shape), out.dtype) == (shape, dtype)
    assert out.is_contiguous()
    return out
