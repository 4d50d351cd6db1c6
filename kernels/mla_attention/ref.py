"""Multi-head latent attention in its absorbed form, one query row at a time, in plain torch."""

import torch

from kernels.kv_pool import AttentionRows, KvPool
from kernels.paged_attention.ref import stored_values, verify_pages_of
from kernels.seals import SealCheck


def positions_of(row: int, rows: AttentionRows, selected: torch.Tensor | None) -> torch.Tensor:
    """What a row attends to: int64 [n]."""
    last = int(rows.row_position[row])
    if selected is None:
        return torch.arange(last + 1)
    is_wrong = (selected[row] < 0) | (selected[row] > last)
    return selected[row][is_wrong.cumsum(dim=0) == 0].long()


def mla_attention_ref(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    softmax_scale: float,
    selected: torch.Tensor | None,
    seal_check: SealCheck | None,
) -> torch.Tensor:
    """q_latent float32 [T, heads, L], q_rope float32 [T, heads, R] -> float32 [T, heads, L]. Reads no key beyond a row's own position."""
    out = torch.empty_like(q_latent)
    for row in range(len(q_latent)):
        positions = positions_of(row, rows, selected)
        if seal_check is not None:
            verify_pages_of(pool, layer, rows, seal_check, row, positions)
        pages = rows.page_table[int(rows.row_sequence[row])]
        keys = stored_values(pool.k_rows[layer], pool.k_scale[layer], pages, positions, pool)[0]  # [n, L + R]
        query = torch.cat([q_latent[row], q_rope[row]], dim=1)
        scores = (query.unsqueeze(1) * keys).sum(dim=2) * softmax_scale  # [heads, n]
        weights = torch.softmax(scores, dim=1)
        out[row] = (weights.unsqueeze(2) * keys[:, : q_latent.shape[2]]).sum(dim=1)
    return out
