"""Round-to-nearest: a scale (and zero point) for each group of a row, searched for the least error.

W[n, k] is stood for by (code[n, k] - zero[n, k // g]) * scale[n, k // g], codes and zero points signed numbers of `bits` bits: what the
compressed-tensors format calls `group`. The scale is rounded to the type that it is stored in before codes are chosen, so that the error
that is searched for is the one that is made.
"""

from dataclasses import dataclass
from itertools import product

import torch

# How far the largest value of a group is pulled in before it's divided among the codes. Eight bits have little to gain.
_SHRINK = {4: tuple(1 - 0.02 * step for step in range(-1, 16)), 8: (1.0, 0.996, 0.99)}
_SHRINK_ENDS = {4: (1.0, 0.95, 0.9, 0.84, 0.78), 8: (1.0, 0.994)}


@dataclass(frozen=True, slots=True)
class Precision:
    """How a matrix is quantized. Group sizes are columns."""

    bits: int
    group_size: int
    is_symmetric: bool = True

    @property
    def lowest(self) -> int:
        """The least code."""
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def __str__(self) -> str:
        return f"INT{self.bits} g{self.group_size}{'' if self.is_symmetric else ' with minimum'}"


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows of a matrix as codes."""

    codes: torch.Tensor  # int8 [N, K]
    scale: torch.Tensor  # [N, K / group_size], of the type that it's stored in
    zero: torch.Tensor | None  # int8 [N, K / group_size]

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]; the products are exact."""
        num_rows, num_groups = self.scale.shape
        codes = self.codes.view(num_rows, num_groups, -1).float()
        if self.zero is not None:
            codes = codes - self.zero.unsqueeze(2).float()
        return (codes * self.scale.unsqueeze(2).float()).view(num_rows, -1)


def rounded_to_nearest(weight: torch.Tensor, precision: Precision, scale_dtype: torch.dtype) -> Quantized:
    """weight float32 [N, K], K a multiple of the group size, all finite."""
    scale, zero = search_scales(weight, precision, scale_dtype)
    groups = weight.view(len(weight), -1, precision.group_size)
    codes = encode(groups, scale.unsqueeze(2), None if zero is None else zero.unsqueeze(2), precision)
    return Quantized(codes.to(torch.int8).view(weight.shape), scale, zero)


def encode(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, precision: Precision) -> torch.Tensor:
    """The nearest codes as float32; scale and zero broadcast to values."""
    codes = values / scale.float()
    if zero is not None:
        codes = codes + zero.float()
    return codes.round_().clamp_(precision.lowest, precision.highest)


def search_scales(
    weight: torch.Tensor, precision: Precision, scale_dtype: torch.dtype, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale [N, K / g] of `scale_dtype` and zero point int8 [N, K / g] or None, by the least squared error of weight float32 [N, K].

    `importance` [K] weighs the columns' errors. Without it an error counts by the size of its weight: a scale that clips the few large weights of a
    group for the many small ones' sake has the least error, but a model hangs on the large ones (measured, see docs/quantization.md).
    """
    groups = weight.view(len(weight), -1, precision.group_size)
    # Errors beside the group's largest value: squares of what they are may not fit a float.
    inverse = groups.abs().amax(dim=2, keepdim=True).reciprocal_().clamp_(max=torch.finfo(torch.float32).max)
    factors = groups.abs() * inverse if importance is None else importance.view(1, -1, precision.group_size)
    best = torch.full(groups.shape[:2], float("inf"))
    best_scale = torch.ones(groups.shape[:2], dtype=scale_dtype)
    best_zero = None if precision.is_symmetric else torch.zeros(groups.shape[:2], dtype=torch.int8)
    for scale, zero in _candidates(groups, precision, scale_dtype):
        wide = scale.float().unsqueeze(2)
        error = encode(groups, wide, None if zero is None else zero.unsqueeze(2), precision)
        if zero is not None:
            error -= zero.unsqueeze(2)
        error.mul_(wide).sub_(groups).mul_(inverse).square_()
        total = error.mul_(factors).sum(dim=2)
        is_better = total < best
        best = torch.where(is_better, total, best)
        best_scale = torch.where(is_better, scale, best_scale)
        if best_zero is not None and zero is not None:
            best_zero = torch.where(is_better, zero, best_zero)
    return best_scale, best_zero


def _candidates(
    groups: torch.Tensor, precision: Precision, scale_dtype: torch.dtype
) -> "list[tuple[torch.Tensor, torch.Tensor | None]]":
    if precision.is_symmetric:
        largest = groups.abs().amax(dim=2) / precision.highest
        return [(_stored(largest * shrink, scale_dtype), None) for shrink in _SHRINK[precision.bits]]
    low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    steps = precision.highest - precision.lowest
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for shrink_low, shrink_high in product(_SHRINK_ENDS[precision.bits], repeat=2):
        scale = _stored((high * shrink_high - low * shrink_low) / steps, scale_dtype)
        zero = (precision.lowest - low * shrink_low / scale.float()).round_()
        found.append((scale, zero.clamp_(precision.lowest, precision.highest).to(torch.int8)))
    return found


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Positive and finite in its type: down to its subnormal numbers, as far as float32 can divide by them. A group of zeros has scale 1."""
    limits = torch.finfo(dtype)
    least = max(limits.smallest_normal * limits.eps, torch.finfo(torch.float32).smallest_normal)
    return torch.where(scale > 0, scale, 1.0).clamp_(least, limits.max).to(dtype)
