"""The product with unquantized weights for GPUs: float16 on tensor cores, or float32 as three TF32 products.

The order of additions is that of `int4_matmul/gpu.py`: ranges of 1,024 columns, added in order.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT, OUT_TILE, capability, num_processors, row_tile
from kernels.gpu.ranges import RANGE_COLUMNS, add_ranges
from kernels.gpu.rows import rounded_rows
from kernels.gpu_weights import GpuDenseWeight

_NARROW_STEP = 64
_WIDE_STEP = 32


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, x_unit, matrix, out, out_stride, w_unit, rows, num_out, x_columns, w_stride, range_columns,
    IS_WIDE: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """One tile [OUTS, ROWS] of the transposed product; with SPLIT, of one range's part of it, left without units."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    column = tl.arange(0, STEP)
    x_tile = x + m.to(tl.int64)[None, :] * x_columns + column[:, None]
    w_tile = matrix + n.to(tl.int64)[:, None] * w_stride + column[None, :]
    is_row = (m < rows)[None, :]
    first, end = 0, w_stride
    if SPLIT:
        first = tl.program_id(2) * range_columns
        end = min(first + range_columns, w_stride)
    total = tl.zeros((OUTS, ROWS), dtype=tl.float32)
    for range_first in range(first, end, range_columns):
        part = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for step in range(range_first, min(range_first + range_columns, w_stride), STEP):
            w = tl.load(w_tile + step)
            if IS_WIDE:
                is_there = is_row & (step + column < x_columns)[:, None]
                part = tl.dot(w, tl.load(x_tile + step, mask=is_there, other=0.0), part, input_precision="tf32x3")
            else:
                part = tl.dot(w, tl.load(x_tile + step, mask=is_row, other=0.0), part)
        total += part
    if SPLIT:
        place = (tl.program_id(2) * rows + m).to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(out + place, total, mask=is_row & (n < num_out)[:, None])
    else:
        place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
        units = tl.load(x_unit + m, mask=m < rows, other=0.0)
        tl.store(out + place, total * units[None, :] * w_unit, mask=is_row & (n < num_out)[:, None])


def dense_matmul_gpu(x: torch.Tensor, w: GpuDenseWeight, out: torch.Tensor) -> None:
    """x float32 [M, K] -> out float32 [M, N], rows as far apart as they lie; arguments have been checked."""
    num_rows, num_out = out.shape
    padded_out, stride = w.matrix.shape
    is_wide = w.matrix.dtype is torch.float32
    if is_wide:
        rounded, units = x, torch.ones(num_rows, dtype=torch.float32, device=x.device)
    else:
        rounded, units = rounded_rows(x, stride)
    # Three products of float32 parts need many registers: a small tile for all numbers of rows.
    rows = 16 if is_wide else row_tile(num_rows, capability(x.device))
    tiles = (triton.cdiv(num_rows, rows), padded_out // OUT_TILE)
    num_ranges = triton.cdiv(stride, RANGE_COLUMNS)
    is_split = num_ranges > 1 and tiles[0] * tiles[1] < 2 * num_processors(x.device)
    target = torch.empty(num_ranges, num_rows, num_out, dtype=torch.float32, device=x.device) if is_split else out
    _product[(*tiles, num_ranges if is_split else 1)](
        rounded, units, w.matrix, target, out.stride(0), w.unit, num_rows, num_out, rounded.shape[1], stride, RANGE_COLUMNS,
        IS_WIDE=is_wide, SPLIT=is_split, STEP=_WIDE_STEP if is_wide else _NARROW_STEP, ROWS=rows, OUTS=OUT_TILE,
        num_warps=4, num_stages=3, **EXACT,
    )  # fmt: skip
    if is_split:
        add_ranges(target, units, w.unit, out)
