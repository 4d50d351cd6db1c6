"""Multi-head latent attention for GPUs, for decode and for (chunked) prefill, with one kernel.

A program takes one row and 16 of its heads, which are the rows of its products: all heads read the same keys. Keys are summed over in ranges
of 256 and ranges merged in order, as in `paged_attention/gpu.py`. Where there are few rows, each range gets a program and a second kernel
merges; else one program walks them all. Both do the same operations for a row in the same order, and no program reads for two rows.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT, capability, num_processors, operand
from kernels.gpu.narrow_floats import NATIVE_E4M3
from kernels.kv_pool import AttentionRows, KvPool
from kernels.page_seal.gpu import verify_all_reads_gpu
from kernels.paged_attention.gpu import finite_or_zero, merged_rows, merged_weight, rounded_query, stored
from kernels.seals import SealCheck

RANGE_KEYS = 256
KEYS_AT_ONCE = 32
HEADS_AT_ONCE = 16
_LOG2_E = 1.4426950408889634
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _query(place, is_head, WIDTH: tl.constexpr, PADDED: tl.constexpr, TYPE: tl.constexpr):
    """Both halves of some heads' queries, float32 [heads, PADDED] each: every other element beside bytes, which are read in pairs."""
    half: tl.constexpr = WIDTH // 2
    d = tl.arange(0, PADDED)
    first = 2 * d if TYPE == "fp8" else d
    to_second: tl.constexpr = 1 if TYPE == "fp8" else half
    is_there = is_head[:, None] & (d < half)[None, :]
    a = tl.load(place[:, None] + first[None, :], mask=is_there, other=0.0)
    b = tl.load(place[:, None] + first[None, :] + to_second, mask=is_there, other=0.0)
    return a, b


@triton.jit
def _num_keys(positions, selected, row, max_selected, HAS_SELECTED: tl.constexpr):
    """An upper bound of how many keys a row has, 0 for padding and for a row for which nothing is selected."""
    count = tl.load(positions + row) + 1
    if HAS_SELECTED:
        count = tl.minimum(count, max_selected)
        first = tl.load(selected + row.to(tl.int64) * max_selected)
        count = tl.where((first >= 0) & (first <= tl.load(positions + row)), count, 0)
    return count


@triton.jit(do_not_specialize=["num_ranges"])
def _attend(
    q_latent, q_rope, k, k_scale, table, sequences, positions, selected, out, part_out, part_max, part_sum,
    latent_stride, rope_stride, score_scale, max_pages, max_selected, num_ranges,
    HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr, IS_NATIVE: tl.constexpr, HAS_SELECTED: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one row; with SPLIT one range of its keys, else all of them."""
    row = tl.program_id(0)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_head = head < HEADS
    position = tl.load(positions + row)
    count = _num_keys(positions, selected, row, max_selected, HAS_SELECTED)
    first_range, end_range = 0, (count + RANGE - 1) // RANGE
    if SPLIT:
        first_range = tl.program_id(2)
        end_range = tl.minimum(end_range, first_range + 1)
        if first_range >= end_range:
            return
    pages = table + tl.load(sequences + row).to(tl.int64) * max_pages
    latent_place = q_latent + row.to(tl.int64) * latent_stride + head * LATENT
    rope_place = q_rope + row.to(tl.int64) * rope_stride + head * ROPE
    a, b = _query(latent_place, is_head, LATENT, LATENT_PADDED, TYPE)
    latent_a, latent_b, latent_unit = rounded_query(a, b, TYPE)
    a, b = _query(rope_place, is_head, ROPE, ROPE_PADDED, TYPE)
    rope_a, rope_b, rope_unit = rounded_query(a, b, TYPE)
    scale = tl.load(k_scale)
    latent_factor, rope_factor = latent_unit * (score_scale * scale), rope_unit * (score_scale * scale)
    ones = tl.full((KEYS, 16), 1.0, dtype=latent_a.dtype)
    # Elements as they are read: pairs of bytes count as one.
    width: tl.constexpr = (LATENT + ROPE) // 2 if TYPE == "fp8" else LATENT + ROPE
    rope_first: tl.constexpr = LATENT // 2 if TYPE == "fp8" else LATENT
    d, e = tl.arange(0, LATENT_PADDED), tl.arange(0, ROPE_PADDED)

    largest = tl.full((ROWS,), _NOTHING, dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    total_a, total_b = (
        tl.zeros((ROWS, LATENT_PADDED), dtype=tl.float32),
        tl.zeros((ROWS, LATENT_PADDED), dtype=tl.float32),
    )
    for index in range(first_range, end_range):
        range_largest = tl.full((ROWS,), _NOTHING, dtype=tl.float32)
        range_weight = tl.zeros((ROWS, 16), dtype=tl.float32)
        range_a, range_b = (
            tl.zeros((ROWS, LATENT_PADDED), dtype=tl.float32),
            tl.zeros((ROWS, LATENT_PADDED), dtype=tl.float32),
        )
        for first in range(index * RANGE, tl.minimum((index + 1) * RANGE, count), KEYS):
            number = first + tl.arange(0, KEYS)
            if HAS_SELECTED:
                key = tl.load(selected + row.to(tl.int64) * max_selected + number, mask=number < count, other=-1)
            else:
                key = number
            is_key = (key >= 0) & (key <= position)
            page = tl.load(pages + key // PAGE, mask=is_key, other=0).to(tl.int64)
            start = k + (page * PAGE + key % PAGE)[:, None] * width
            is_latent = is_key[:, None] & (d < LATENT // 2)[None, :]
            keys_a, keys_b = stored(start + d[None, :], is_latent, LATENT // 2, TYPE, IS_NATIVE)
            scores = tl.dot(operand(latent_a), tl.trans(operand(keys_a)))
            scores = tl.dot(operand(latent_b), tl.trans(operand(keys_b)), scores) * latent_factor[:, None]
            is_rope = is_key[:, None] & (e < ROPE // 2)[None, :]
            turned_a, turned_b = stored(start + rope_first + e[None, :], is_rope, ROPE // 2, TYPE, IS_NATIVE)
            turned = tl.dot(operand(rope_a), tl.trans(operand(turned_a)))
            turned = tl.dot(operand(rope_b), tl.trans(operand(turned_b)), turned)
            scores = tl.where(
                is_key[None, :], tl.fma(turned, tl.broadcast_to(rope_factor[:, None], turned.shape), scores), _NOTHING
            )
            both = tl.maximum(range_largest, tl.max(scores, axis=1))
            shrunk = tl.exp2(range_largest - finite_or_zero(both))[:, None]
            weights = operand(tl.exp2(scores - finite_or_zero(both)[:, None]).to(latent_a.dtype))
            range_weight = tl.dot(weights, operand(ones), range_weight * shrunk)
            range_a = tl.dot(weights, operand(keys_a), range_a * shrunk)
            range_b = tl.dot(weights, operand(keys_b), range_b * shrunk)
            range_largest = both
        # All 16 columns hold the same sum.
        one_weight = tl.sum(range_weight, axis=1) * 0.0625
        if SPLIT:
            part = (row * HEADS + head).to(tl.int64) * num_ranges + index
            tl.store(part_max + part, range_largest, mask=is_head)
            tl.store(part_sum + part, one_weight, mask=is_head)
            _store_halves(part_out + part * LATENT, range_a, range_b, is_head, LATENT, LATENT_PADDED, TYPE)
        else:
            largest, weight, old, new = merged_weight(largest, weight, range_largest, one_weight)
            total_a, total_b = merged_rows(total_a, range_a, old, new), merged_rows(total_b, range_b, old, new)
    if not SPLIT:
        divisor = tl.broadcast_to(tl.where(count > 0, weight, 1.0)[:, None], total_a.shape)
        place = out + (row * HEADS + head).to(tl.int64) * LATENT
        total_a, total_b = tl.math.div_rn(total_a, divisor) * scale, tl.math.div_rn(total_b, divisor) * scale
        _store_halves(place, total_a, total_b, is_head, LATENT, LATENT_PADDED, TYPE)


@triton.jit
def _store_halves(place, a, b, is_head, WIDTH: tl.constexpr, PADDED: tl.constexpr, TYPE: tl.constexpr):
    """What `_query` reads, the other way round."""
    half: tl.constexpr = WIDTH // 2
    d = tl.arange(0, PADDED)
    first = 2 * d if TYPE == "fp8" else d
    to_second: tl.constexpr = 1 if TYPE == "fp8" else half
    is_there = is_head[:, None] & (d < half)[None, :]
    tl.store(place[:, None] + first[None, :], a, mask=is_there)
    tl.store(place[:, None] + first[None, :] + to_second, b, mask=is_there)


@triton.jit(do_not_specialize=["num_ranges"])
def _merge_ranges(
    part_out, part_max, part_sum, k_scale, positions, selected, out, max_selected, num_ranges,
    HEADS: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, HAS_SELECTED: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """One row's result for one head from its ranges, in order; zeros where it has no key."""
    row, head = tl.program_id(0), tl.program_id(1)
    count = _num_keys(positions, selected, row, max_selected, HAS_SELECTED)
    d = tl.arange(0, PADDED)
    largest = tl.full((1,), _NOTHING, dtype=tl.float32)
    weight = tl.zeros((1,), dtype=tl.float32)
    total = tl.zeros((1, PADDED), dtype=tl.float32)
    first = (row * HEADS + head).to(tl.int64) * num_ranges + tl.zeros((1,), dtype=tl.int64)
    for index in range((count + RANGE - 1) // RANGE):
        place = part_out + (first + index)[:, None] * LATENT + d[None, :]
        part = tl.load(place, mask=(d < LATENT)[None, :], other=0.0)
        range_largest, one_weight = tl.load(part_max + first + index), tl.load(part_sum + first + index)
        largest, weight, old, new = merged_weight(largest, weight, range_largest, one_weight)
        total = merged_rows(total, part, old, new)
    divisor = tl.broadcast_to(tl.where(count > 0, weight, 1.0)[:, None], total.shape)
    target = out + (row * HEADS + head).to(tl.int64) * LATENT + d[None, :]
    tl.store(target, tl.math.div_rn(total, divisor) * tl.load(k_scale), mask=(d < LATENT)[None, :])


def mla_attention_gpu(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    softmax_scale: float,
    selected: torch.Tensor | None,
    check: SealCheck | None,
    out: torch.Tensor,
) -> None:
    """q_latent float32 [T, heads, L], q_rope float32 [T, heads, R], rows as far apart as they lie -> out; arguments have been checked.

    Programs of 16 heads each read the same keys, and seals cover the indexer's keys too: pages are verified by programs of their own,
    which come first.
    """
    if check is not None:
        verify_all_reads_gpu(pool, layer, rows, check, selected=selected)
    num_rows, num_heads, latent = out.shape
    layout, rope = pool.layout, q_rope.shape[2]
    max_selected = 0 if selected is None else selected.shape[1]
    longest = rows.page_table.shape[1] * layout.page_size if selected is None else max_selected
    num_ranges, head_tiles = triton.cdiv(longest, RANGE_KEYS), triton.cdiv(num_heads, HEADS_AT_ONCE)
    is_split = num_ranges > 1 and num_rows * head_tiles < 2 * num_processors(out.device)
    shape = (num_rows, num_heads, num_ranges) if is_split else (0, 0, 0)
    parts, largest, sums = (
        torch.empty(*shape, *more, dtype=torch.float32, device=out.device) for more in ((latent,), (), ())
    )
    keys = pool.k_rows[layer]
    k = keys.view(torch.int16) if layout.dtype == "fp8" else keys
    chosen = rows.row_position if selected is None else selected
    scale = pool.k_scale[layer]
    _attend[(num_rows, head_tiles, num_ranges if is_split else 1)](
        q_latent, q_rope, k, scale, rows.page_table, rows.row_sequence, rows.row_position, chosen, out, parts, largest, sums,
        q_latent.stride(0), q_rope.stride(0), softmax_scale * _LOG2_E, rows.page_table.shape[1], max_selected, num_ranges,
        HEADS=num_heads, LATENT=latent, LATENT_PADDED=max(16, triton.next_power_of_2(latent // 2)),
        ROPE=rope, ROPE_PADDED=max(16, triton.next_power_of_2(max(rope // 2, 1))), PAGE=layout.page_size, TYPE=layout.dtype,
        IS_NATIVE=capability(out.device) >= NATIVE_E4M3, HAS_SELECTED=selected is not None, SPLIT=is_split,
        ROWS=HEADS_AT_ONCE, KEYS=KEYS_AT_ONCE, RANGE=RANGE_KEYS, num_warps=8, num_stages=1, **EXACT,
    )  # fmt: skip
    if is_split:
        _merge_ranges[(num_rows, num_heads)](
            parts, largest, sums, scale, rows.row_position, chosen, out, max_selected, num_ranges,
            HEADS=num_heads, LATENT=latent, PADDED=triton.next_power_of_2(latent), HAS_SELECTED=selected is not None,
            RANGE=RANGE_KEYS, num_warps=1, **EXACT,
        )  # fmt: skip
