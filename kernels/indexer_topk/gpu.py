"""The choice of positions by an indexer on GPUs: scores by a kernel, the choice by a top-k over integers that hold score and position.

Each program scores keys for one row, whose heads are the rows of its product, so that a score depends on nothing but the row and the key.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT, capability, operand
from kernels.gpu.narrow_floats import NATIVE_E4M3
from kernels.kv_pool import AttentionRows, KvPool
from kernels.page_seal.gpu import verify_all_reads_gpu
from kernels.paged_attention.gpu import rounded_query, stored
from kernels.seals import SealCheck

_KEYS_AT_ONCE = 64
_SCORES_AT_ONCE = 1 << 26  # bounds the memory for scores


@triton.jit
def _score(
    q, weights, k, table, sequences, positions, scores, q_stride, weights_stride, max_pages, num_keys,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
    IS_NATIVE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The scores of KEYS keys for one row; -infinity beyond its position. Scales are left out: positive factors change no order."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    is_key = key <= position
    half: tl.constexpr = DIM // 2
    d, head = tl.arange(0, PADDED), tl.arange(0, ROWS)
    first = 2 * d if TYPE == "fp8" else d
    to_second: tl.constexpr = 1 if TYPE == "fp8" else half
    place = q + row.to(tl.int64) * q_stride + head[:, None] * DIM + first[None, :]
    is_there = (head < HEADS)[:, None] & (d < half)[None, :]
    even = tl.load(place, mask=is_there, other=0.0)
    odd = tl.load(place + to_second, mask=is_there, other=0.0)
    q_a, q_b, unit = rounded_query(even, odd, TYPE)
    pages = table + tl.load(sequences + row).to(tl.int64) * max_pages
    page = tl.load(pages + key // PAGE, mask=is_key, other=0).to(tl.int64)
    row_elements: tl.constexpr = half if TYPE == "fp8" else DIM
    start = k + (page * PAGE + key % PAGE)[:, None] * row_elements + d[None, :]
    keys_a, keys_b = stored(start, is_key[:, None] & (d < half)[None, :], half, TYPE, IS_NATIVE)
    products = tl.dot(operand(q_a), tl.trans(operand(keys_a)))
    products = tl.dot(operand(q_b), tl.trans(operand(keys_b)), products) * unit[:, None]
    positive = tl.where(products < 0.0, 0.0, products)  # a NaN stays
    counts = tl.load(weights + row.to(tl.int64) * weights_stride + head, mask=head < HEADS, other=0.0)
    total = tl.sum(tl.where((head < HEADS)[:, None], positive * counts[:, None], 0.0), axis=0)
    tl.store(scores + row.to(tl.int64) * num_keys + key, tl.where(is_key, total, float("-inf")), mask=key < num_keys)


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """int64 whose order is that of the scores, then of the lower position; a NaN is above all. scores float32 [T, keys]."""
    bits = (scores + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    ordered = torch.where(torch.isnan(scores), 0x7FFFFFFF, ordered)
    return (ordered << 32) - torch.arange(scores.shape[1], device=scores.device)


def indexer_topk_gpu(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    check: SealCheck | None,
    out: torch.Tensor,
) -> None:
    """q float32 [T, heads, D], weights float32 [T, heads], rows as far apart as they lie -> out int32 [T, n]; arguments have been checked.

    Pages of sequences with a row that has a choice are verified by programs of their own, which come first.
    """
    if check is not None:
        verify_all_reads_gpu(pool, layer, rows, check, fewest=out.shape[1] + 1)
    longest = rows.page_table.shape[1] * pool.layout.page_size
    at_once = max(1, _SCORES_AT_ONCE // longest)
    for first in range(0, len(q), at_once):
        some = slice(first, first + at_once)
        _choose(q[some], weights[some], pool, layer, rows, first, out[some])


def _choose(
    q: torch.Tensor, weights: torch.Tensor, pool: KvPool, layer: int, rows: AttentionRows, first: int, out: torch.Tensor
) -> None:
    layout, stored_keys = pool.layout, pool.values_of(layer)
    assert stored_keys is not None
    positions, sequences = rows.row_position[first : first + len(q)], rows.row_sequence[first : first + len(q)]
    num_heads, dim = q.shape[1:]
    longest = rows.page_table.shape[1] * layout.page_size
    scores = torch.empty(len(q), longest, dtype=torch.float32, device=q.device)
    _score[(len(q), triton.cdiv(longest, _KEYS_AT_ONCE))](
        q, weights, stored_keys.view(torch.int16) if layout.dtype == "fp8" else stored_keys, rows.page_table, sequences, positions,
        scores, q.stride(0), weights.stride(0), rows.page_table.shape[1], longest,
        HEADS=num_heads, ROWS=max(16, triton.next_power_of_2(num_heads)), DIM=dim, PADDED=max(16, triton.next_power_of_2(dim // 2)),
        PAGE=layout.page_size, TYPE=layout.dtype, IS_NATIVE=capability(q.device) >= NATIVE_E4M3, KEYS=_KEYS_AT_ONCE,
        num_warps=4, num_stages=1, **EXACT,
    )  # fmt: skip
    count = min(out.shape[1], longest)
    chosen = _ranks(scores).topk(count, dim=1, sorted=False).indices
    beyond = torch.where(chosen > positions.long()[:, None], longest, chosen).sort(dim=1).values
    out.fill_(-1)
    out[:, :count] = torch.where(beyond == longest, -1, beyond).int()
