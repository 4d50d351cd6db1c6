"""Sums that several programs computed parts of: parts are added in the order of their ranges, as one program would."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT

RANGE_COLUMNS = 1024
_OUTS = tl.constexpr(512)


@triton.jit(do_not_specialize=["num_rows"])
def _add_ranges(parts, x_unit, out, out_stride, w_unit, num_rows, num_out, num_ranges):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * _OUTS + tl.arange(0, _OUTS)
    is_out = n < num_out
    total = tl.zeros((_OUTS,), dtype=tl.float32)
    for index in range(num_ranges):
        total += tl.load(parts + (index * num_rows + row) * num_out + n, mask=is_out, other=0.0)
    tl.store(out + row * out_stride + n, total * tl.load(x_unit + row) * w_unit, mask=is_out)


def add_ranges(parts: torch.Tensor, x_unit: torch.Tensor, w_unit: float, out: torch.Tensor) -> None:
    """parts float32 [ranges, M, N] -> out [M, N], times each row's unit and the matrix's."""
    num_ranges, num_rows, num_out = parts.shape
    grid = (num_rows, triton.cdiv(num_out, _OUTS.value))
    _add_ranges[grid](parts, x_unit, out, out.stride(0), w_unit, num_rows, num_out, num_ranges, num_warps=4, **EXACT)
