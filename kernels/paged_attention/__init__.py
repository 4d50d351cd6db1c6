"""Attention over paged keys and values, for decode and for (chunked) prefill alike."""

import torch

from kernels.backend import Backend
from kernels.checks import check_rows, output, sizes
from kernels.errors import KernelError
from kernels.kv_pool import AttentionRows, KvPool, check_pool
from kernels.native_pool import native_layer
from kernels.paged_attention.ref import paged_attention_ref
from kernels.seal_arguments import check_seals, native_check
from kernels.seals import SealCheck


def paged_attention(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    rows: AttentionRows,
    *,
    softmax_scale: float,
    window: int | None = None,
    seal_check: SealCheck | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """q float32 [T, heads, D]; row t attends to keys 0..row_position[t] of its sequence, or to the last `window` of them.

    Keys and values are always the stored ones, so `kv_write` comes first. The sum over keys runs over fixed ranges of 128, merged in
    order (online softmax, Milakov and Gimelshein 2018), whether ranges are computed by one thread or several. Nothing beyond a row's own
    position enters its arithmetic. With `seal_check` every page is verified in the pass that reads it; what is found is noted in
    `seal_check.violations`, and rows of that sequence mean nothing. Rows of q may lie further apart than they are long. `rows.check` must have passed for this pool.
    """
    layout = pool.layout
    if layout.is_latent or layout.num_value_layers != layout.num_layers or layout.v_dim != layout.head_dim:
        raise KernelError("paged_attention: the pool must have keys and values of one size in every layer")
    num_rows, num_heads, dim = sizes("paged_attention", "q", q, 3)
    stride = check_rows("paged_attention", "q", q, (len(rows.row_sequence), None, layout.head_dim), backend)
    check_pool("paged_attention", pool, backend)
    if num_heads % layout.num_kv_heads:
        raise KernelError(f"paged_attention: {num_heads} heads are no multiple of {layout.num_kv_heads} kv heads")
    if window is not None and window < 1:
        raise KernelError(f"paged_attention: window must be positive, got {window}")
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"paged_attention: layer must be in [0, {layout.num_layers}), got {layer}")
    result = output("paged_attention", out, (num_rows, num_heads, dim), backend)
    if backend is Backend.REF:
        return result.copy_(paged_attention_ref(q, pool, layer, rows, softmax_scale, window, seal_check))
    if backend is Backend.GPU:
        check_seals("paged_attention", seal_check, rows, pool, backend)
        placed = placed_rows("paged_attention", rows, q.device)
        if num_rows:
            from kernels.paged_attention.gpu import paged_attention_gpu

            paged_attention_gpu(q, pool, layer, placed, softmax_scale, window, seal_check, result)
        return result
    from kernels import _native

    table = rows.page_table
    _native.paged_attention(
        q.data_ptr(), stride, result.data_ptr(), table.data_ptr(), rows.row_sequence.data_ptr(),
        rows.row_position.data_ptr(), num_rows, num_heads, table.shape[1], window or 0, softmax_scale,
        *native_check("paged_attention", seal_check, layer, rows, pool), native_layer(pool, layer),
    )  # fmt: skip
    return result


def placed_rows(op: str, rows: AttentionRows, device: torch.device) -> AttentionRows:
    """Rows with a plan, where the queries are. Making one for each layer would wait for the GPU each time."""
    if rows.plan is not None and rows.row_sequence.device.type == device.type:
        return rows
    if device.type != "cpu":
        raise KernelError(f"{op}: rows must be on the GPU with their plan, see AttentionRows.to")
    return rows.to(device)
