"""The quantized product for GPUs, for 4 and 8 bits: weights become float16 in registers, tensor cores add in float32.

y[m, n] = sum over ranges of 1,024 columns of (sum over columns of x[m, k] * w[n, k]), ranges added in order. A row's order of additions
is therefore the same whether one program walks all ranges or several share them, and with any number of rows; the tile is fixed for each
kind of device, so that one instruction computes a row at every M.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.codes import plane_of_weights
from kernels.gpu.launch import EXACT, OUT_TILE, capability, num_processors, row_tile
from kernels.gpu.ranges import RANGE_COLUMNS, add_ranges
from kernels.gpu.rows import rounded_rows
from kernels.gpu_weights import GpuInt4Weight, GpuInt8Weight


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, x_unit, codes, scales, out, out_stride, w_unit, rows, num_out, padded_out, x_stride, num_chunks, chunks_a_range,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HAS_MINIMUM: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """One tile [OUTS, ROWS] of the transposed product; with SPLIT, of one range's part of it, left without units."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    column = tl.arange(0, WIDTH)
    planes: tl.constexpr = 16 // BITS
    chunk_columns: tl.constexpr = planes * WIDTH
    padded = padded_out.to(tl.int64)
    x_tile = x + m.to(tl.int64)[None, :] * x_stride + column[:, None]
    code_tile = codes + n.to(tl.int64)[:, None] * WIDTH + column[None, :]
    is_row = (m < rows)[None, :]
    first, end = 0, num_chunks
    if SPLIT:
        first = tl.program_id(2) * chunks_a_range
        end = min(first + chunks_a_range, num_chunks)
    total = tl.zeros((OUTS, ROWS), dtype=tl.float32)
    for range_first in range(first, end, chunks_a_range):
        part = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for chunk in range(range_first, min(range_first + chunks_a_range, num_chunks)):
            words = tl.load(code_tile + padded * WIDTH * chunk)
            for plane in tl.static_range(planes):
                first_column = chunk * chunk_columns + plane * WIDTH
                numbers = tl.load(x_tile + first_column, mask=is_row, other=0.0)
                scale = tl.load(scales + padded * (first_column // GROUP) + n)[:, None]
                part = tl.dot(plane_of_weights(words, plane, scale, BITS, HAS_MINIMUM), numbers, part)
        total += part
    if SPLIT:
        place = (tl.program_id(2) * rows + m).to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(out + place, total, mask=is_row & (n < num_out)[:, None])
    else:
        units = tl.load(x_unit + m, mask=m < rows, other=0.0)
        tl.store(
            out + m.to(tl.int64)[None, :] * out_stride + n[:, None],
            total * units[None, :] * w_unit,
            mask=is_row & (n < num_out)[:, None],
        )


def quantized_matmul(x: torch.Tensor, w: GpuInt4Weight | GpuInt8Weight, out: torch.Tensor) -> None:
    """x float32 [M, K] -> out float32 [M, N], rows as far apart as they lie; arguments have been checked."""
    num_rows, num_out = out.shape
    num_chunks, padded_out, width = w.codes.shape
    chunk_columns = width * 16 // w.bits
    chunks_a_range = RANGE_COLUMNS // chunk_columns
    rounded, units = rounded_rows(x, num_chunks * chunk_columns)
    rows = row_tile(num_rows, capability(x.device))
    tiles = (triton.cdiv(num_rows, rows), padded_out // OUT_TILE)
    num_ranges = triton.cdiv(num_chunks, chunks_a_range)
    # With too few tiles to fill the processors, programs share a tile's ranges.
    is_split = num_ranges > 1 and tiles[0] * tiles[1] < 2 * num_processors(x.device)
    target = torch.empty(num_ranges, num_rows, num_out, dtype=torch.float32, device=x.device) if is_split else out
    _product[(*tiles, num_ranges if is_split else 1)](
        rounded, units, w.codes, w.scales, target, out.stride(0), w.unit, num_rows, num_out, padded_out, rounded.shape[1], num_chunks, chunks_a_range,
        BITS=w.bits, GROUP=w.group_size, WIDTH=width, HAS_MINIMUM=w.has_minimum, SPLIT=is_split, ROWS=rows, OUTS=OUT_TILE,
        num_warps=4, num_stages=3, **EXACT,
    )  # fmt: skip
    if is_split:
        add_ranges(target, units, w.unit, out)
