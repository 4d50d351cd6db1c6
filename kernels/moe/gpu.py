"""A mixture of experts for GPUs: one program routes a row, one multiplies a tile of rows that chose the same expert.

Nothing waits for the device: how many rows an expert got is known there alone, so as many programs are started as could be needed, and those
without rows end at once. Sums run over ranges of 1,024 columns, added in order, as those of `int4_matmul/gpu.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.codes import plane_of_weights
from kernels.gpu.launch import EXACT, MAX_ROW_TILE, OUT_TILE, capability, row_tile
from kernels.gpu.ranges import RANGE_COLUMNS
from kernels.gpu.rows import rounded_rows
from kernels.gpu_weights import GpuDenseWeight
from kernels.moe.gpu_experts import GpuExpertMatrices, GpuExperts
from kernels.moe.routing import Routing
from kernels.silu_mul.gpu import silu_mul_gpu

_STEP = tl.constexpr(1024)
_DENSE_STEP = 64


@triton.jit
def _route(
    logits, bias, chosen, weights, num_experts, scale,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, PADDED: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """One row's experts, ascending, and what each one's result counts. Of equal ones the first is chosen."""
    row = tl.program_id(0).to(tl.int64)
    never = float("-inf")
    e = tl.arange(0, PADDED)
    is_expert = e < num_experts
    logit = tl.load(logits + row * num_experts + e, mask=is_expert, other=0.0)
    num_bad = tl.sum(tl.where(tl.abs(logit) <= 3.4028234663852886e38, 0, 1), axis=0)
    logit = tl.where(is_expert, tl.where(num_bad == 0, logit, 0.0), never)
    if IS_SIGMOID:
        scores = tl.math.div_rn(tl.full((PADDED,), 1.0, tl.float32), 1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(logit, axis=0))
        scores = tl.math.div_rn(powers, tl.sum(powers, axis=0) + tl.zeros((PADDED,), tl.float32))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + e, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, never)
    if GROUPS > 1:
        size = num_experts // GROUPS
        group, g = e // size, tl.arange(0, PADDED_GROUPS)
        worth = tl.full((PADDED_GROUPS,), never, tl.float32)
        for i in tl.static_range(GROUPS):
            members = tl.where(group == i, choice, never)
            first = tl.max(members, axis=0)
            place = tl.min(tl.where(members == first, e, PADDED), axis=0)
            second = tl.max(tl.where(e == place, never, members), axis=0)
            worth = tl.where(g == i, tl.where(size > 1, first + second, first), worth)
        is_kept = tl.zeros((PADDED,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.min(tl.where(worth == tl.max(worth, axis=0), g, PADDED_GROUPS), axis=0)
            worth = tl.where(g == best, never, worth)
            is_kept = tl.where(group == best, 1, is_kept)
        choice = tl.where(is_kept == 1, choice, never)
    is_taken = tl.zeros((PADDED,), tl.int32)
    for _ in tl.static_range(TOP_K):
        best = tl.min(tl.where(choice == tl.max(choice, axis=0), e, PADDED), axis=0)
        choice = tl.where(e == best, never, choice)
        is_taken = tl.where(e == best, 1, is_taken)
    if num_bad > 0:
        is_taken = tl.where(e < TOP_K, 1, 0)
    counted = scores
    if IS_NORMALIZED:
        total = tl.sum(tl.where(is_taken == 1, scores, 0.0), axis=0) + 1e-20
        counted = tl.math.div_rn(scores, total + tl.zeros((PADDED,), tl.float32))
    counted = tl.where(num_bad > 0, float("nan"), counted * scale)
    place = row * TOP_K + tl.cumsum(is_taken, axis=0) - 1
    tl.store(chosen + place, e, mask=is_taken == 1)
    tl.store(weights + place, counted, mask=is_taken == 1)


@triton.jit
def _quantized_product(
    x, x_unit, x_rows, codes, scales, w_units, out, tile_expert, tile_first, tile_end, num_out, padded_out, x_stride, num_chunks, num_groups,
    chunks_a_range,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HAS_MINIMUM: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """One tile [OUTS, ROWS] of an expert's transposed product."""
    tile = tl.program_id(0)
    first_row, end_row = tl.load(tile_first + tile), tl.load(tile_end + tile)
    if first_row < end_row:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        m = first_row + tl.arange(0, ROWS)
        n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        column = tl.arange(0, WIDTH)
        planes: tl.constexpr = 16 // BITS
        chunk_columns: tl.constexpr = planes * WIDTH
        padded = padded_out.to(tl.int64)
        source = tl.load(x_rows + m, mask=m < end_row, other=0).to(tl.int64)
        x_tile = x + source[None, :] * x_stride + column[:, None]
        code_tile = codes + expert * num_chunks * padded * WIDTH + n.to(tl.int64)[:, None] * WIDTH + column[None, :]
        own_scales = scales + expert * num_groups * padded
        is_row = (m < end_row)[None, :]
        total = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for range_first in range(0, num_chunks, chunks_a_range):
            part = tl.zeros((OUTS, ROWS), dtype=tl.float32)
            for chunk in range(range_first, min(range_first + chunks_a_range, num_chunks)):
                words = tl.load(code_tile + padded * WIDTH * chunk)
                for plane in tl.static_range(planes):
                    first_column = chunk * chunk_columns + plane * WIDTH
                    numbers = tl.load(x_tile + first_column, mask=is_row, other=0.0)
                    scale = tl.load(own_scales + padded * (first_column // GROUP) + n)[:, None]
                    part = tl.dot(plane_of_weights(words, plane, scale, BITS, HAS_MINIMUM), numbers, part)
            total += part
        units = tl.load(x_unit + source, mask=m < end_row, other=0.0) * tl.load(w_units + expert)
        place = out + m.to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(place, total * units[None, :], mask=is_row & (n < num_out)[:, None])


@triton.jit
def _dense_product(
    x, x_unit, x_rows, matrices, w_units, out, tile_expert, tile_first, tile_end, num_out, padded_out, x_stride, x_columns, w_stride,
    range_columns,
    IS_WIDE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """The same for unquantized matrices."""
    tile = tl.program_id(0)
    first_row, end_row = tl.load(tile_first + tile), tl.load(tile_end + tile)
    if first_row < end_row:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        m = first_row + tl.arange(0, ROWS)
        n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        column = tl.arange(0, STEP)
        source = tl.load(x_rows + m, mask=m < end_row, other=0).to(tl.int64)
        x_tile = x + source[None, :] * x_stride + column[:, None]
        w_tile = matrices + (expert * padded_out + n.to(tl.int64))[:, None] * w_stride + column[None, :]
        is_row = (m < end_row)[None, :]
        total = tl.zeros((OUTS, ROWS), dtype=tl.float32)
        for range_first in range(0, w_stride, range_columns):
            part = tl.zeros((OUTS, ROWS), dtype=tl.float32)
            for step in range(range_first, min(range_first + range_columns, w_stride), STEP):
                is_there = is_row & (step + column < x_columns)[:, None]
                numbers = tl.load(x_tile + step, mask=is_there, other=0.0)
                if IS_WIDE:
                    part = tl.dot(tl.load(w_tile + step), numbers, part, input_precision="tf32x3")
                else:
                    part = tl.dot(tl.load(w_tile + step), numbers, part)
            total += part
        units = tl.load(w_units + expert) + tl.zeros((ROWS,), tl.float32)
        if not IS_WIDE:
            units *= tl.load(x_unit + source, mask=m < end_row, other=0.0)
        place = out + m.to(tl.int64)[None, :] * num_out + n[:, None]
        tl.store(place, total * units[None, :], mask=is_row & (n < num_out)[:, None])


@triton.jit
def _combine(results, weights, places, added, out, size, TOP_K: tl.constexpr, HAS_ADDED: tl.constexpr):
    """A stretch of one row: the sum over its experts in their order, then what is added."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _STEP + tl.arange(0, _STEP)
    is_there = column < size
    total = tl.zeros((_STEP,), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        place = tl.load(places + row * TOP_K + i).to(tl.int64)
        weight = tl.load(weights + row * TOP_K + i) + tl.zeros((_STEP,), tl.float32)
        total = tl.fma(weight, tl.load(results + place * size + column, mask=is_there, other=0.0), total)
    if HAS_ADDED:
        total += tl.load(added + row * size + column, mask=is_there, other=0.0)
    tl.store(out + row * size + column, total, mask=is_there)


@dataclass(frozen=True, slots=True)
class _Order:
    """(row, choice) pairs ordered by expert, then by row, and the tiles that they fall into."""

    source: torch.Tensor  # int32 [pairs], the row of each ordered pair
    place: torch.Tensor  # int32 [rows, top_k], where each pair went
    tile_expert: torch.Tensor  # int32 [tiles]
    tile_first: torch.Tensor
    tile_end: torch.Tensor
    rows: int  # of a tile


def _order(chosen: torch.Tensor, num_experts: int) -> _Order:
    """Only whole numbers, and as many tiles as there could be: those past the last have no rows."""
    num_pairs, device = chosen.numel(), chosen.device
    version = capability(device)
    # Where few rows may have a small tile, many get one of half the usual size: an expert has few rows, and addresses of gathered rows take registers.
    has_one_tile = row_tile(1, version) == MAX_ROW_TILE
    rows = MAX_ROW_TILE if has_one_tile else min(row_tile(num_pairs, version), MAX_ROW_TILE // 2)
    experts, order = torch.sort(chosen.flatten(), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, experts.long(), torch.ones_like(order))
    ends, tile_ends = counts.cumsum(0), ((counts + rows - 1) // rows).cumsum(0)
    tile = torch.arange(num_pairs // rows + min(num_experts, num_pairs), device=device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    known = expert.clamp(max=num_experts - 1)
    end = torch.where(expert < num_experts, ends[known], 0)
    before = tile_ends[known] - (counts[known] + rows - 1) // rows
    first = torch.where(expert < num_experts, ends[known] - counts[known] + (tile - before) * rows, 0)
    return _Order(
        (order // chosen.shape[1]).int(), place.int().view(chosen.shape), known.int(), first.int(),
        torch.minimum(end, first + rows).int(), rows,
    )  # fmt: skip


def _multiply(x: torch.Tensor, x_rows: torch.Tensor, w: GpuExpertMatrices, order: _Order) -> torch.Tensor:
    """Ordered pairs' products, float32 [pairs, out]; x_rows names the row of x that each pair takes."""
    num_out, one = w.shape[0], w.first
    out = torch.empty(len(order.source), num_out, dtype=torch.float32, device=x.device)
    tiles = (order.tile_expert, order.tile_first, order.tile_end)
    grid = (len(order.tile_expert), triton.cdiv(num_out, OUT_TILE))
    if isinstance(one, GpuDenseWeight):
        padded_out, stride = one.matrix.shape
        is_wide = one.matrix.dtype is torch.float32
        rounded, units = (x, w.units) if is_wide else rounded_rows(x, stride)
        _dense_product[grid](
            rounded, units, x_rows, w.numbers, w.units, out, *tiles, num_out, padded_out, rounded.shape[1], rounded.shape[1], stride,
            RANGE_COLUMNS, IS_WIDE=is_wide, STEP=_DENSE_STEP // 2 if is_wide else _DENSE_STEP, ROWS=order.rows, OUTS=OUT_TILE, num_warps=4,
            num_stages=3, **EXACT,
        )  # fmt: skip
        return out
    num_chunks, padded_out, width = one.codes.shape
    chunk_columns = width * 16 // one.bits
    rounded, units = rounded_rows(x, num_chunks * chunk_columns)
    _quantized_product[grid](
        rounded, units, x_rows, w.numbers, w.scales, w.units, out, *tiles, num_out, padded_out, rounded.shape[1], num_chunks,
        one.scales.shape[0], RANGE_COLUMNS // chunk_columns, BITS=one.bits, GROUP=one.group_size, WIDTH=width, HAS_MINIMUM=one.has_minimum,
        ROWS=order.rows, OUTS=OUT_TILE, num_warps=4, num_stages=3, **EXACT,
    )  # fmt: skip
    return out


def route_gpu(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's experts int32 [T, top_k], ascending, and what their results count, float32."""
    num_rows = len(logits)
    chosen = torch.empty(num_rows, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=logits.device)
    bias = logits if routing.bias is None else routing.bias
    _route[(num_rows,)](
        logits, bias, chosen, weights, routing.num_experts, routing.scale, TOP_K=routing.top_k, GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups, IS_SIGMOID=routing.scoring == "sigmoid", HAS_BIAS=routing.bias is not None,
        IS_NORMALIZED=routing.normalize, PADDED=triton.next_power_of_2(routing.num_experts),
        PADDED_GROUPS=triton.next_power_of_2(routing.num_groups), num_warps=1, **EXACT,
    )  # fmt: skip
    return chosen, weights


def experts_gpu(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: GpuExperts, added: torch.Tensor | None, out: torch.Tensor
) -> None:  # fmt: skip
    """The weighted sum of each row's chosen experts, into `out`."""
    (num_rows, top_k), size = chosen.shape, out.shape[1]
    order = _order(chosen, experts.num_experts)
    gate_up = _multiply(x, order.source, experts.gate_up, order)
    product = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=torch.float32, device=x.device)
    silu_mul_gpu(gate_up, product)
    own_rows = torch.arange(len(product), dtype=torch.int32, device=x.device)
    results = _multiply(product, own_rows, experts.down, order)
    _combine[(num_rows, triton.cdiv(size, _STEP.value))](
        results, weights, order.place, results if added is None else added, out, size,
        TOP_K=top_k, HAS_ADDED=added is not None, num_warps=4, **EXACT,
    )  # fmt: skip


def moe_gpu(
    x: torch.Tensor, logits: torch.Tensor, experts: GpuExperts, routing: Routing, added: torch.Tensor | None, out: torch.Tensor
) -> None:  # fmt: skip
    """Into `out`; arguments have been checked."""
    chosen, weights = route_gpu(logits, routing)
    experts_gpu(x, chosen, weights, experts, added, out)
