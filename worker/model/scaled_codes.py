"""Integer codes with scales and zero points, as checkpoints have them, in the form that kernels take: (code - zero point) * scale.

Kernels take groups of a few sizes, and scale and minimum of one type. A larger group is cut into equal ones that repeat its scale; bfloat16
scales become float16 where that changes no value, else float32. With float16 scales, `minimum` is exact in float32: 11 bits times 4.
"""

import torch

from worker.model.errors import ModelError
from worker.model.tensors import QuantizedRows, paired, unpaired

_GROUP_SIZES = (128, 64, 32, 16)


def quantized_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | int,
    group_size: int,
    source: str,
    order: torch.Tensor | None = None,
) -> QuantizedRows:
    """Codes and `order` as QuantizedRows has them, scale [N, groups] of any float type, zero points of that shape or one for all.

    Raises ModelError if the groups can't be brought to a size that kernels take; `source` names the tensor.
    """
    is_small = codes.dtype is torch.uint8
    taken = next((size for size in _GROUP_SIZES[: 3 if is_small else 4] if group_size % size == 0), None)
    if taken is None:
        raise ModelError(
            f"{source}: groups of {group_size} columns are not supported: a multiple of 32 (8 bits: 16) is"
        )
    wide = scale.float()
    lowest = None if isinstance(zero_point, int) and zero_point == 0 else wide * -zero_point
    if _fits_float16(wide) and (lowest is None or _fits_float16(lowest)):
        wide, lowest = wide.half(), None if lowest is None else lowest.half()
    repeats = group_size // taken
    if repeats > 1:
        wide = wide.repeat_interleave(repeats, dim=1)
        lowest = None if lowest is None else lowest.repeat_interleave(repeats, dim=1)
    lowest = None if lowest is None else lowest.contiguous()
    return QuantizedRows(codes, wide.contiguous(), lowest, taken, None if order is None else order.int())


def columns_taken(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Codes with their columns in another order, in the same form."""
    return paired(unpaired(codes)[:, order]) if codes.dtype is torch.uint8 else codes[:, order]


def _fits_float16(numbers: torch.Tensor) -> bool:
    return bool((numbers.half().float() == numbers).all())
