"""Attention over paged keys and values for GPUs, for decode and for (chunked) prefill, with one kernel.

Keys are summed over in ranges of 256, and ranges merged in order. Decode rows get a program for each range and a second kernel that
merges; tiles of a prompt's rows walk the ranges themselves. Both do the same operations for a row in the same order: 64 keys at a time
(32 for wide heads), products by the warp-level tensor-core instruction (tiles stay below the 64 rows from which the compiler takes
others), sums of weights by that instruction too, so that no tree of additions depends on the tile. What a row does not see
enters as an exact zero.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT, capability, operand
from kernels.gpu.narrow_floats import NATIVE_E4M3, from_e4m3
from kernels.gpu.range_seals import check_range, kept, step_sums
from kernels.gpu.rows import unit_of
from kernels.gpu.seals import check_arguments, seal_arguments
from kernels.kv_pool import TILE_TOKENS, AttentionRows, KvPool
from kernels.page_seal.gpu import verify_reads_gpu
from kernels.seals import SealCheck

RANGE_KEYS = 256
KEYS_AT_ONCE = 32
HEADS_AT_ONCE = 16
DECODE_ROWS = 16
TILE_ROWS = 32
_LOG2_E = 1.4426950408889634
_NO_WINDOW = 1 << 30
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def finite_or_zero(largest):
    """A maximum that can be subtracted: that of a row that has seen nothing is replaced by zero."""
    return tl.where(largest == _NOTHING, 0.0, largest)


@triton.jit
def merged_weight(largest, weight, range_largest, range_weight):
    """Two softmax sums as one (Milakov and Gimelshein, 2018): maximum, sum of weights, and the factors of both vectors.

    Each operation is written out, here and where vectors are merged, so that both kernels do the same.
    """
    both = tl.maximum(largest, range_largest)
    old, new = tl.exp2(largest - finite_or_zero(both)), tl.exp2(range_largest - finite_or_zero(both))
    return both, tl.fma(weight, old, range_weight * new), old, new


@triton.jit
def merged_rows(total, range_total, old, new):
    """The vectors of the same two sums, [rows, elements]."""
    return tl.fma(total, tl.broadcast_to(old[:, None], total.shape), range_total * new[:, None])


@triton.jit
def rounded_query(even, odd, TYPE: tl.constexpr):
    """Both halves of the queries in the type of the keys' products, and each row's unit: float16 has one, bfloat16 needs none."""
    if TYPE == "bf16":
        unit = tl.full((even.shape[0],), 1.0, dtype=tl.float32)
        a, b = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    else:
        factor, unit = unit_of(tl.maximum(tl.max(tl.abs(even), axis=1), tl.max(tl.abs(odd), axis=1)))
        a, b = (even * factor[:, None]).to(tl.float16), (odd * factor[:, None]).to(tl.float16)
    return a, b, unit


@triton.jit
def stored(pointers, is_there, HALF: tl.constexpr, TYPE: tl.constexpr, IS_NATIVE: tl.constexpr):
    """Both halves of stored vectors as the products take them, zero where nothing is to be read."""
    a, b, _, _ = stored_words(pointers, is_there, HALF, TYPE, IS_NATIVE)
    return a, b


@triton.jit
def stored_words(pointers, is_there, HALF: tl.constexpr, TYPE: tl.constexpr, IS_NATIVE: tl.constexpr):
    """The same, and the words int16 of both; 8-bit elements have the same words in both halves.

    8-bit elements are read in pairs: transposing 16-bit words is an instruction, transposing bytes is not.
    """
    if TYPE == "fp8":
        words_a = tl.load(pointers, mask=is_there, other=0)
        words_b = words_a
        a, b = from_e4m3(words_a, 0, IS_NATIVE), from_e4m3(words_a, 1, IS_NATIVE)
    else:
        a, b = tl.load(pointers, mask=is_there, other=0.0), tl.load(pointers + HALF, mask=is_there, other=0.0)
        words_a, words_b = a.to(tl.int16, bitcast=True), b.to(tl.int16, bitcast=True)
    return a, b, words_a, words_b


@triton.jit
def guarded(values, scores):
    """Values that are not finite become zero, and poison their key's scores instead: else a row that does not see them would
    take them in as zero times NaN."""
    wide = values.to(tl.float32)
    is_sound = wide - wide == 0.0
    poison = tl.sum(tl.where(is_sound, 0.0, float("nan")), axis=1)
    return tl.where(is_sound, values, 0.0), scores + poison[None, :]


@triton.jit(do_not_specialize=["layer"])
def _attend(
    q, k, v, k_scale, v_scale, table, sequences, positions, items, out, part_out, part_max, part_sum,
    q_stride, score_scale, window, max_pages, num_ranges, layer, seals, check,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr, IS_NATIVE: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
    SUBTILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, RANGE: tl.constexpr, CHECKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """TOKENS rows of one sequence by GROUP heads of one key head; with SPLIT one range of keys, else all of them.

    With CHECKS, beside SPLIT only, whole pages are read and verified.
    """
    ratio: tl.constexpr = HEADS // KV_HEADS
    head_tiles: tl.constexpr = (ratio + GROUP - 1) // GROUP
    kv_head = tl.program_id(1) // head_tiles
    line = tl.arange(0, ROWS)
    member = tl.program_id(1) % head_tiles * GROUP + line % GROUP
    item = tl.program_id(0) // SUBTILES
    token = tl.program_id(0) % SUBTILES * TOKENS + line // GROUP
    first_row, count = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    is_line = (token < count) & (line // GROUP < TOKENS) & (member < ratio)
    row = first_row + token
    position = tl.load(positions + row, mask=is_line, other=-1)
    first_key = tl.maximum(position + 1 - window, 0)
    lowest = tl.min(tl.where(position >= 0, first_key, 0x7FFFFFFF), axis=0)
    last = tl.max(position, axis=0)
    first_range, end_range = lowest // RANGE, last // RANGE + 1
    if SPLIT:
        first_range = tl.maximum(first_range, tl.program_id(2))
        end_range = tl.minimum(end_range, tl.program_id(2) + 1)
        if first_range >= end_range:
            return
    sequence = tl.load(sequences + first_row).to(tl.int64)
    pages = table + sequence * max_pages
    end_key = (last // PAGE + 1) * PAGE if CHECKS else last + 1

    # A vector's elements in two halves: every other one of bytes, which are read in pairs, or the first and the second half.
    d = tl.arange(0, PADDED)
    a_element = 2 * d if TYPE == "fp8" else d
    to_b: tl.constexpr = 1 if TYPE == "fp8" else HALF
    row_elements: tl.constexpr = HALF if TYPE == "fp8" else 2 * HALF
    place = (kv_head * ratio + member)[:, None] * 2 * HALF + a_element[None, :]
    is_element = is_line[:, None] & (d < HALF)[None, :]
    q_row = q + row.to(tl.int64)[:, None] * q_stride + place
    q_even = tl.load(q_row, mask=is_element, other=0.0)
    q_odd = tl.load(q_row + to_b, mask=is_element, other=0.0)
    q_a, q_b, unit = rounded_query(q_even, q_odd, TYPE)
    factor = unit * (score_scale * tl.load(k_scale + kv_head))
    ones = tl.full((KEYS, 16), 1.0, dtype=q_a.dtype)

    largest = tl.full((ROWS,), _NOTHING, dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    total_a, total_b = tl.zeros((ROWS, PADDED), dtype=tl.float32), tl.zeros((ROWS, PADDED), dtype=tl.float32)
    for index in range(first_range, end_range):
        range_largest = tl.full((ROWS,), _NOTHING, dtype=tl.float32)
        range_weight = tl.zeros((ROWS, 16), dtype=tl.float32)
        range_a, range_b = tl.zeros((ROWS, PADDED), dtype=tl.float32), tl.zeros((ROWS, PADDED), dtype=tl.float32)
        if CHECKS:
            sums = tl.zeros((2 * RANGE // KEYS * (2 if PAGE < KEYS else 1),), dtype=tl.int32)
        first = tl.maximum(index * RANGE, lowest // KEYS * KEYS)
        for first_of_step in range(first, tl.minimum((index + 1) * RANGE, end_key), KEYS):
            key = first_of_step + tl.arange(0, KEYS)
            is_key = (key >= lowest) & (key < end_key)
            page = tl.load(pages + key // PAGE, mask=is_key, other=0).to(tl.int64)
            start = ((page * KV_HEADS + kv_head) * PAGE + key % PAGE) * row_elements
            is_there = is_key[:, None] if HALF == PADDED else is_key[:, None] & (d < HALF)[None, :]
            k_cells, v_cells = k + start[:, None] + d[None, :], v + start[:, None] + d[None, :]
            keys_a, keys_b, k_words_a, k_words_b = stored_words(k_cells, is_there, HALF, TYPE, IS_NATIVE)
            scores = tl.dot(operand(q_a), tl.trans(operand(keys_a)))
            scores = tl.dot(operand(q_b), tl.trans(operand(keys_b)), scores) * factor[:, None]
            values_a, values_b, v_words_a, v_words_b = stored_words(v_cells, is_there, HALF, TYPE, IS_NATIVE)
            if not SPLIT:
                values_a, scores = guarded(values_a, scores)
                values_b, scores = guarded(values_b, scores)
            is_seen = (key[None, :] <= position[:, None]) & (key[None, :] >= first_key[:, None])
            scores = tl.where(is_seen, scores, _NOTHING)
            both = tl.maximum(range_largest, tl.max(scores, axis=1))
            shrunk = tl.exp2(range_largest - finite_or_zero(both))[:, None]
            weights = operand(tl.exp2(scores - finite_or_zero(both)[:, None]).to(q_a.dtype))
            range_weight = tl.dot(weights, operand(ones), range_weight * shrunk)
            range_a = tl.dot(weights, operand(values_a), range_a * shrunk)
            range_b = tl.dot(weights, operand(values_b), range_b * shrunk)
            range_largest = both
            if CHECKS:
                step = step_sums(k_words_a, k_words_b, v_words_a, v_words_b, seals, first_of_step, HALF, PAGE, TYPE)
                sums = kept(sums, step, (first_of_step - index * RANGE) // KEYS)
        if CHECKS:
            if HAS_WINDOW:
                # Slots of the first page that the row doesn't see any more.
                begin = tl.maximum(lowest // PAGE * PAGE, index * RANGE)
                for first_of_step in range(begin // KEYS * KEYS, lowest, KEYS):
                    key = first_of_step + tl.arange(0, KEYS)
                    is_there = ((key >= begin) & (key < lowest))[:, None] & (d < HALF)[None, :]
                    page = tl.load(pages + key // PAGE, mask=key < lowest, other=0).to(tl.int64)
                    cell = (((page * KV_HEADS + kv_head) * PAGE + key % PAGE) * row_elements)[:, None] + d[None, :]
                    _, _, k_words_a, k_words_b = stored_words(k + cell, is_there, HALF, TYPE, IS_NATIVE)
                    _, _, v_words_a, v_words_b = stored_words(v + cell, is_there, HALF, TYPE, IS_NATIVE)
                    step = step_sums(k_words_a, k_words_b, v_words_a, v_words_b, seals, first_of_step, HALF, PAGE, TYPE)
                    sums = kept(sums, step, (first_of_step - index * RANGE) // KEYS)
            check_range(
                sums, seals, check, pages, sequence, layer, kv_head, index, lowest // PAGE, last // PAGE, max_pages,
                KV_HEADS, PAGE, RANGE,
            )  # fmt: skip
        # All 16 columns hold the same sum.
        one_weight = tl.sum(range_weight, axis=1) * 0.0625
        if SPLIT:
            part = (item * HEADS + kv_head * ratio + member).to(tl.int64) * num_ranges + index
            tl.store(part_max + part, range_largest, mask=is_line)
            tl.store(part_sum + part, one_weight, mask=is_line)
            elements = part[:, None] * 2 * HALF + a_element[None, :]
            tl.store(part_out + elements, range_a, mask=is_element)
            tl.store(part_out + elements + to_b, range_b, mask=is_element)
        else:
            largest, weight, old, new = merged_weight(largest, weight, range_largest, one_weight)
            total_a = merged_rows(total_a, range_a, old, new)
            total_b = merged_rows(total_b, range_b, old, new)
    if not SPLIT:
        divisor = tl.broadcast_to(tl.where(position >= 0, weight, 1.0)[:, None], total_a.shape)
        scale = tl.load(v_scale + kv_head)
        out_row = out + row.to(tl.int64)[:, None] * (HEADS * 2 * HALF) + place
        tl.store(out_row, tl.math.div_rn(total_a, divisor) * scale, mask=is_element)
        tl.store(out_row + to_b, tl.math.div_rn(total_b, divisor) * scale, mask=is_element)


@triton.jit
def _merge_ranges(
    part_out, part_max, part_sum, v_scale, positions, items, out, window, num_ranges,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """One decode row's result for one head from its ranges, in order. A row at a negative position is padding: zeros."""
    item, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(items + 2 * item)
    position = tl.load(positions + row)
    d = tl.arange(0, PADDED)
    target = out + (row.to(tl.int64) * HEADS + head) * DIM + d
    largest = tl.full((1,), _NOTHING, dtype=tl.float32)
    weight = tl.zeros((1,), dtype=tl.float32)
    total = tl.zeros((PADDED,), dtype=tl.float32)
    first = (item * HEADS + head).to(tl.int64) * num_ranges + tl.zeros((1,), dtype=tl.int64)
    for index in range(tl.maximum(position + 1 - window, 0) // RANGE, (position + RANGE) // RANGE):
        range_total = tl.load(part_out + (first + index) * DIM + d, mask=d < DIM, other=0.0)
        range_largest, range_weight = tl.load(part_max + first + index), tl.load(part_sum + first + index)
        largest, weight, old, new = merged_weight(largest, weight, range_largest, range_weight)
        total = tl.fma(total, tl.zeros_like(total) + old, range_total * new)
    weight = tl.where(position >= 0, weight, 1.0)
    result = tl.math.div_rn(total, tl.zeros_like(total) + weight) * tl.load(v_scale + head // (HEADS // KV_HEADS))
    tl.store(target, result, mask=d < DIM)


def paged_attention_gpu(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    softmax_scale: float,
    window: int | None,
    check: SealCheck | None,
    out: torch.Tensor,
) -> None:
    """q float32 [T, heads, D], rows as far apart as they lie -> out; arguments have been checked, `rows` placed.

    Decode programs verify what they read. The programs of a prompt's tiles would each verify the same pages: these are verified once by
    programs of their own, which come first.
    """
    assert rows.plan is not None
    call = _Call(q, pool, layer, rows, softmax_scale * _LOG2_E, window or _NO_WINDOW, check, out)
    if len(rows.plan.singles):
        _attend_singles(call, rows.plan.singles)
    if len(rows.plan.tiles):
        if check is not None:
            verify_reads_gpu(pool, layer, rows, rows.plan.tiles, check, window=window)
        _attend_tiles(call, rows.plan.tiles)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the op."""

    q: torch.Tensor
    pool: KvPool
    layer: int
    rows: AttentionRows
    score_scale: float
    window: int
    check: SealCheck | None
    out: torch.Tensor

    @property
    def group(self) -> int:
        """Heads of one key head that a program takes."""
        return min(self.q.shape[1] // self.pool.layout.num_kv_heads, HEADS_AT_ONCE)

    @property
    def head_programs(self) -> int:
        """Programs for all heads of a row."""
        kv_heads = self.pool.layout.num_kv_heads
        return kv_heads * triton.cdiv(self.q.shape[1] // kv_heads, self.group)

    @property
    def padded(self) -> int:
        """Half of a vector's elements, in a tile."""
        return max(16, triton.next_power_of_2(self.q.shape[2] // 2))

    @property
    def verifies_as_it_reads(self) -> bool:
        """Whether decode programs verify: a step of keys must be of one or two pages, and one program must read for a whole key head."""
        page, kv_heads = self.pool.layout.page_size, self.pool.layout.num_kv_heads
        fits = KEYS_AT_ONCE // 2 <= page <= RANGE_KEYS and RANGE_KEYS % page == 0
        return self.check is not None and fits and self.head_programs == kv_heads


def _attend_singles(call: _Call, items: torch.Tensor) -> None:
    num_heads, dim = call.q.shape[1:]
    pool, rows, check = call.pool, call.rows, call.check
    num_ranges = triton.cdiv(rows.page_table.shape[1] * pool.layout.page_size, RANGE_KEYS)
    parts = torch.empty(len(items), num_heads, num_ranges, dim + 2, dtype=torch.float32, device=call.q.device)
    sizes = (len(items) * num_heads * num_ranges * dim, len(items) * num_heads * num_ranges)
    part_out, part_max, part_sum = parts.view(-1).split([sizes[0], sizes[1], sizes[1]])
    checks = call.verifies_as_it_reads
    if check is not None and not checks:
        verify_reads_gpu(pool, call.layer, rows, items, check, window=call.window)
    _attend[(len(items), call.head_programs, num_ranges)](
        *_tensors(call), items, call.out, part_out, part_max, part_sum,
        call.q.stride(0), call.score_scale, call.window, rows.page_table.shape[1], num_ranges, call.layer,
        seal_arguments(pool) if checks else None, check_arguments(check) if checks and check is not None else None,
        SPLIT=True, TOKENS=1, SUBTILES=1, ROWS=DECODE_ROWS, CHECKS=checks, HAS_WINDOW=checks and call.window < _NO_WINDOW,
        num_warps=max(1, call.padded // 32) if checks else 1, num_stages=3, **_constants(call), **EXACT,
    )  # fmt: skip
    _merge_ranges[(len(items), num_heads)](
        part_out, part_max, part_sum, pool.v_scale[call.layer], rows.row_position, items, call.out, call.window, num_ranges,
        HEADS=num_heads, KV_HEADS=pool.layout.num_kv_heads, DIM=dim, PADDED=triton.next_power_of_2(dim), RANGE=RANGE_KEYS, num_warps=1, **EXACT,
    )  # fmt: skip


def _attend_tiles(call: _Call, items: torch.Tensor) -> None:
    tokens = TILE_ROWS // call.group
    subtiles = triton.cdiv(TILE_TOKENS, tokens)
    out = call.out
    _attend[(len(items) * subtiles, call.head_programs, 1)](
        *_tensors(call), items, out, out, out, out,
        call.q.stride(0), call.score_scale, call.window, call.rows.page_table.shape[1], 1, call.layer, None, None,
        SPLIT=False, TOKENS=tokens, SUBTILES=subtiles, ROWS=TILE_ROWS, CHECKS=False, HAS_WINDOW=False,
        num_warps=4, num_stages=2 if call.pool.layout.dtype == "fp8" else 3, **_constants(call), **EXACT,
    )  # fmt: skip


def _tensors(call: _Call) -> tuple[torch.Tensor, ...]:
    """The queries, the layer's keys, values and scales, and what each row attends to."""
    pool, rows = call.pool, call.rows
    k, v = pool.k_rows[call.layer], pool.v[call.layer]
    if pool.layout.dtype == "fp8":
        k, v = k.view(torch.int16), v.view(torch.int16)
    scales = (pool.k_scale[call.layer], pool.v_scale[call.layer])
    return (call.q, k, v, *scales, rows.page_table, rows.row_sequence, rows.row_position)


def _constants(call: _Call) -> dict[str, int | bool | str]:
    """What both ways of starting the kernel share; nothing in it depends on the batch."""
    layout = call.pool.layout
    return {
        "HEADS": call.q.shape[1],
        "KV_HEADS": layout.num_kv_heads,
        "GROUP": call.group,
        "HALF": layout.head_dim // 2,
        "PADDED": call.padded,
        "PAGE": layout.page_size,
        "TYPE": layout.dtype,
        "IS_NATIVE": capability(call.q.device) >= NATIVE_E4M3,
        "KEYS": KEYS_AT_ONCE,
        "RANGE": RANGE_KEYS,
    }
