"""Causal grouped-query attention over paged keys and values, one query row at a time, in plain torch."""

import torch

from kernels.kv_pool import AttentionRows, KvPool
from kernels.page_seal.ref import seal_ref
from kernels.seals import SealCheck


def stored_values(
    stored: torch.Tensor, scale: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, pool: KvPool
) -> torch.Tensor:
    """Keys or values at positions int64 [n] of one sequence: float32 [kv_heads, n, D]."""
    size = pool.layout.page_size
    raw = stored[pages[positions // size].long(), :, positions % size]
    wide = raw.contiguous().view(torch.float8_e4m3fn).float() if pool.layout.dtype == "fp8" else raw.float()
    return wide.permute(1, 0, 2) * scale.view(-1, 1, 1)


def paged_attention_ref(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    softmax_scale: float,
    window: int | None,
    seal_check: SealCheck | None = None,
) -> torch.Tensor:
    """q float32 [T, heads, D] -> float32 [T, heads, D]. Reads no key beyond a row's own position."""
    num_rows, num_heads, dim = q.shape
    num_kv_heads = pool.layout.num_kv_heads
    out = torch.empty_like(q)
    for row in range(num_rows):
        last = int(rows.row_position[row]) + 1
        first = max(0, last - window) if window else 0
        pages = rows.page_table[int(rows.row_sequence[row])]
        if seal_check is not None:
            verify_pages_of(pool, layer, rows, seal_check, row, torch.arange(first, last))
        k = stored_values(pool.k_rows[layer], pool.k_scale[layer], pages, torch.arange(first, last), pool)
        v = stored_values(pool.v[layer], pool.v_scale[layer], pages, torch.arange(first, last), pool)
        grouped = q[row].view(num_kv_heads, num_heads // num_kv_heads, 1, dim)
        scores = (grouped * k.unsqueeze(1)).sum(dim=3) * softmax_scale  # [kv_heads, group, keys]
        weights = torch.softmax(scores, dim=2)
        out[row] = (weights.unsqueeze(3) * v.unsqueeze(1)).sum(dim=2).view(num_heads, dim)
    return out


def verify_pages_of(
    pool: KvPool, layer: int, rows: AttentionRows, check: SealCheck, row: int, positions: torch.Tensor
) -> None:
    """Note down the first page, of those in which a row reads positions int64 [n], that has not the seal that it must have."""
    assert pool.seals is not None
    size, sequence = pool.layout.page_size, int(rows.row_sequence[row])
    for place in sorted(set((positions // size).tolist())):
        page = int(rows.page_table[sequence, place])
        count = min(size, int(check.num_tokens[sequence]) - place * size)
        wanted = seal_ref(pool, pool.seals, page, check.page_keys[sequence, place], count)
        if bool((wanted != pool.seals.tags[:, page])[layer].any()) and not check.violations[sequence]:
            check.violations[sequence] = 1 + layer * rows.page_table.shape[1] + place
