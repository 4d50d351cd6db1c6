"""The choice of positions by an indexer, one row at a time, in plain torch."""

import torch

from kernels.kv_pool import AttentionRows, KvPool
from kernels.paged_attention.ref import stored_values, verify_pages_of
from kernels.seals import SealCheck


def indexer_topk_ref(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    num_selected: int,
    seal_check: SealCheck | None,
) -> torch.Tensor:
    """q float32 [T, heads, D], weights float32 [T, heads] -> int32 [T, num_selected]."""
    out = torch.full((len(q), num_selected), -1, dtype=torch.int32)
    stored = pool.values_of(layer)
    assert stored is not None
    for row in range(len(q)):
        positions = torch.arange(int(rows.row_position[row]) + 1)
        if len(positions) > num_selected:
            if seal_check is not None:
                verify_pages_of(pool, layer, rows, seal_check, row, positions)
            pages = rows.page_table[int(rows.row_sequence[row])]
            keys = stored_values(stored, pool.v_scale[layer], pages, positions, pool)[0]  # [n, D]
            scores = ((q[row].unsqueeze(1) * keys).sum(dim=2).relu() * weights[row].unsqueeze(1)).sum(dim=0)
            order = scores.nan_to_num(nan=float("inf"), neginf=-float("inf")).argsort(descending=True, stable=True)
            positions = order[:num_selected].sort().values
        out[row, : len(positions)] = positions.int()
    return out
