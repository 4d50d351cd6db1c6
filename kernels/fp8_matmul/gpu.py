"""The product with 8-bit floats for GPUs: codes become float16, which holds them exactly, and tensor cores add in float32.

A group of 128 columns is multiplied with its scales after it was added up. Groups are added in order within ranges of 1,024 columns, and
ranges in order, as in `int4_matmul/gpu.py`.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT, OUT_TILE, capability, num_processors, row_tile
from kernels.gpu.ranges import RANGE_COLUMNS, add_ranges
from kernels.gpu.rows import rounded_rows
from kernels.gpu_weights import FP8_GROUP, GpuFp8Weight

_STEP = 128


@triton.jit
def from_e4m3_codes(codes):
    """uint8 -> float16, exact for all but NaN, which no weight is."""
    wide = codes.to(tl.int16)
    # Exponent and mantissa moved into float16's fields mean 2^-8 of the number, subnormal ones too.
    bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, x_unit, codes, scales, out, out_stride, rows, num_out, padded_out, stride, range_columns,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """One tile [OUTS, ROWS] of the transposed product; with SPLIT, of one range's part of it, left without units."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    column = tl.arange(0, STEP)
    padded = padded_out.to(tl.int64)
    x_tile = x + m.to(tl.int64)[None, :] * stride + column[:, None]
    code_tile = codes + n.to(tl.int64)[:, None] * stride + column[None, :]
    is_row = (m < rows)[None, :]
    first, end = 0, stride
    if SPLIT:
        first = tl.program_id(2) * range_columns
        end = min(first + range_columns, stride)
    total = tl.zeros((OUTS, ROWS), dtype=tl.float32)
    for range_first in range(first, end, range_columns):
        part = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for group in range(range_first, min(range_first + range_columns, stride), GROUP):
            sums = tl.zeros((OUTS, ROWS), dtype=tl.float32)
            for step in tl.static_range(GROUP // STEP):
                w = from_e4m3_codes(tl.load(code_tile + (group + step * STEP)))
                numbers = tl.load(x_tile + (group + step * STEP), mask=is_row, other=0.0)
                sums = tl.dot(w, numbers, sums)
            part += sums * tl.load(scales + padded * (group // GROUP) + n)[:, None]
        total += part
    if SPLIT:
        place = (tl.program_id(2) * rows + m).to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(out + place, total, mask=is_row & (n < num_out)[:, None])
    else:
        place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
        units = tl.load(x_unit + m, mask=m < rows, other=0.0)
        tl.store(out + place, total * units[None, :], mask=is_row & (n < num_out)[:, None])


def fp8_matmul_gpu(x: torch.Tensor, w: GpuFp8Weight, out: torch.Tensor) -> None:
    """x float32 [M, K] -> out float32 [M, N], rows as far apart as they lie; arguments have been checked."""
    num_rows, num_out = out.shape
    padded_out, stride = w.codes.shape
    rounded, units = rounded_rows(x, stride)
    rows = row_tile(num_rows, capability(x.device))
    tiles = (triton.cdiv(num_rows, rows), padded_out // OUT_TILE)
    num_ranges = triton.cdiv(stride, RANGE_COLUMNS)
    is_split = num_ranges > 1 and tiles[0] * tiles[1] < 2 * num_processors(x.device)
    target = torch.empty(num_ranges, num_rows, num_out, dtype=torch.float32, device=x.device) if is_split else out
    _product[(*tiles, num_ranges if is_split else 1)](
        rounded, units, w.codes, w.scales, target, out.stride(0), num_rows, num_out, padded_out, stride, RANGE_COLUMNS,
        SPLIT=is_split, GROUP=FP8_GROUP, STEP=_STEP, ROWS=rows, OUTS=OUT_TILE, num_warps=8, num_stages=3, **EXACT,
    )  # fmt: skip
    if is_split:
        add_ranges(target, units, 1.0, out)
