"""Which earlier tokens a row of sparse attention looks at, by an indexer's keys."""

import torch

from kernels.backend import Backend, device_of
from kernels.checks import check_rows, check_tensor, sizes
from kernels.errors import KernelError
from kernels.indexer_topk.ref import indexer_topk_ref
from kernels.kv_pool import AttentionRows, KvPool, check_pool
from kernels.native_pool import native_layer
from kernels.paged_attention import placed_rows
from kernels.seal_arguments import check_seals, native_check, native_rows
from kernels.seals import SealCheck


def indexer_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    num_selected: int,
    *,
    seal_check: SealCheck | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """The `num_selected` positions with the highest scores for each row, ascending, int32 [T, num_selected]; -1 in places that are left.

    The score of position s for row t is the sum over heads h of weights[t, h] * max(0, q[t, h] . k[s]) (the lightning indexer of
    DeepSeek-V3.2-Exp, DeepSeek-AI, 2025); k are the layer's stored values, q is float32 [T, heads, v_dim], weights float32 [T, heads]. Equal
    scores go by the lower position, a NaN is above all. A row that sees `num_selected` positions or fewer gets all of them, without a look at any
    key. Positions beyond a row's own don't enter its arithmetic. With `seal_check` every page whose keys are read is verified in the same pass.
    Rows of q and weights may lie further apart than they are long. `rows.check` must have passed for this pool.
    """
    layout, op = pool.layout, "indexer_topk"
    if not 0 <= layer < layout.num_layers or layout.value_index(layer) < 0 or not layout.is_latent:
        raise KernelError(f"{op}: layer {layer} of the pool keeps no indexer's keys")
    if num_selected < 1:
        raise KernelError(f"{op}: num_selected must be positive, got {num_selected}")
    num_rows, num_heads, _ = sizes(op, "q", q, 3)
    q_stride = check_rows(op, "q", q, (len(rows.row_sequence), None, layout.v_dim), backend)
    weights_stride = check_rows(op, "weights", weights, (num_rows, num_heads), backend)
    check_pool(op, pool, backend)
    if out is None:
        out = torch.empty(num_rows, num_selected, dtype=torch.int32, device=device_of(backend))
    check_tensor(op, "out", out, torch.int32, (num_rows, num_selected), backend)
    if backend is Backend.REF:
        return out.copy_(indexer_topk_ref(q, weights, pool, layer, rows, num_selected, seal_check))
    if backend is Backend.GPU:
        check_seals(op, seal_check, rows, pool, backend)
        placed = placed_rows(op, rows, q.device)
        if num_rows:
            from kernels.indexer_topk.gpu import indexer_topk_gpu

            indexer_topk_gpu(q, weights, pool, layer, placed, seal_check, out)
        return out
    from kernels import _native

    _native.indexer_topk(
        q.data_ptr(), q_stride, weights.data_ptr(), weights_stride, out.data_ptr(), num_selected, native_rows(rows), num_heads,
        native_check(op, seal_check, layer, rows, pool), native_layer(pool, layer),
    )  # fmt: skip
    return out
