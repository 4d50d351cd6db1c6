"""Multi-head latent attention over paged latent vectors, in its absorbed form, for decode and for (chunked) prefill alike."""

import torch

from kernels.backend import Backend
from kernels.checks import check_rows, check_tensor, output, sizes
from kernels.errors import KernelError
from kernels.kv_pool import AttentionRows, KvPool, check_pool
from kernels.mla_attention.ref import mla_attention_ref
from kernels.native_pool import native_layer
from kernels.paged_attention import placed_rows
from kernels.seal_arguments import check_seals, native_check, native_rows
from kernels.seals import SealCheck


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    *,
    softmax_scale: float,
    selected: torch.Tensor | None = None,
    seal_check: SealCheck | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """Weighted sums of latent vectors, float32 [T, heads, L]; row t attends to positions 0..row_position[t] of its sequence.

    q_latent float32 [T, heads, L] are queries that were multiplied with the heads' key matrices (DeepSeek-AI, DeepSeek-V2, 2024), q_rope float32
    [T, heads, R] their rotary parts; the pool is a latent one with keys of L + R elements. With `selected` int32 [T, n] a row attends to these
    positions only: ascending, up to the first that is negative or beyond its own position; a row with none gives zeros.

    As in `paged_attention`, keys are the stored ones, the sum over keys runs over ranges of 128 (of those selected), merged in order (on a CPU
    eight at a time, then these eights), nothing beyond a row's own position enters its arithmetic, and `seal_check` verifies every page in the pass that reads it. Rows of the queries may
    lie further apart than they are long. `rows.check` must have passed for this pool.
    """
    layout, op = pool.layout, "mla_attention"
    num_rows, num_heads, latent = sizes(op, "q_latent", q_latent, 3)
    rope = layout.head_dim - latent
    if not layout.is_latent or rope < 0:
        raise KernelError(f"{op}: the pool must be a latent one with keys of {latent} elements or more")
    latent_stride = check_rows(op, "q_latent", q_latent, (len(rows.row_sequence), None, None), backend)
    rope_stride = check_rows(op, "q_rope", q_rope, (num_rows, num_heads, rope), backend)
    check_pool(op, pool, backend)
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"{op}: layer must be in [0, {layout.num_layers}), got {layer}")
    if selected is not None:
        check_tensor(op, "selected", selected, torch.int32, (num_rows, None), backend)
    result = output(op, out, (num_rows, num_heads, latent), backend)
    if backend is Backend.REF:
        return result.copy_(mla_attention_ref(q_latent, q_rope, pool, layer, rows, softmax_scale, selected, seal_check))
    if backend is Backend.GPU:
        check_seals(op, seal_check, rows, pool, backend)
        placed = placed_rows(op, rows, q_latent.device)
        if result.numel():
            from kernels.mla_attention.gpu import mla_attention_gpu

            mla_attention_gpu(q_latent, q_rope, pool, layer, placed, softmax_scale, selected, seal_check, result)
        return result
    from kernels import _native

    chosen = (0, 0) if selected is None else (selected.data_ptr(), selected.shape[1])
    _native.mla_attention(
        q_latent.data_ptr(), latent_stride, q_rope.data_ptr(), rope_stride, result.data_ptr(), native_rows(rows), num_heads,
        latent, rope, *chosen, softmax_scale, native_check(op, seal_check, layer, rows, pool), native_layer(pool, layer),
    )  # fmt: skip
    return result
