"""Rows of activations for the tensor cores: float16 with a power of two for each row.

Eight times as precise as bfloat16 and as safe, since no row can overflow. A row's numbers depend on that row alone.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT

_STEP = tl.constexpr(1024)


@triton.jit
def unit_of(largest):
    """For a magnitude: the power of two that brings it to [2^12, 2^13), and its inverse; both finite for zero, infinity and NaN."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF, 20)
    factor = ((266 - exponent) << 23).to(tl.float32, bitcast=True)
    return factor, ((exponent - 12) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_rows(x, out, units, num_in, padded):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, _STEP)
    largest = tl.zeros((_STEP,), dtype=tl.float32)
    for first in range(0, num_in, _STEP):
        numbers = tl.load(x + row * num_in + first + column, mask=first + column < num_in, other=0.0)
        largest = tl.maximum(largest, tl.abs(numbers))
    factor, unit = unit_of(tl.max(largest, axis=0))
    for first in range(0, padded, _STEP):
        numbers = tl.load(x + row * num_in + first + column, mask=first + column < num_in, other=0.0)
        tl.store(out + row * padded + first + column, (numbers * factor).to(tl.float16), mask=first + column < padded)
    tl.store(units + row, unit)


def rounded_rows(x: torch.Tensor, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [M, K] -> float16 [M, padded], zero beyond K, and float32 [M]: x ~ rounded * unit."""
    num_rows, num_in = x.shape
    rounded = torch.empty(num_rows, padded, dtype=torch.float16, device=x.device)
    units = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _rounded_rows[(num_rows,)](x, rounded, units, num_in, padded, num_warps=4, **EXACT)
    return rounded, units
