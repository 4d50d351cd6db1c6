"""Quantize keys and values, and store them in their pages."""

import torch

from kernels.backend import Backend
from kernels.checks import check_rows, check_tensor, sizes
from kernels.errors import KernelError
from kernels.kv_pool import KvPool, check_pool
from kernels.kv_write.ref import kv_write_ref
from kernels.native_pool import native_layer


def kv_write(
    k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, pool: KvPool, layer: int, *, backend: Backend
) -> None:
    """Store k float32 [T, kv_heads, head_dim] and v float32 [T, kv_heads, v_dim] at slots int64 [T], slot = page * page_size + offset.

    A negative slot skips its row. v is None if, and only if, the layer has no values. Rows of k and of v may lie further apart than they
    are long. All types round value / scale to nearest even; fp16 clamps to +-65504 first, fp8 to +-448; NaN is stored as 0x7f there, which
    nothing finite ever is. If the pool has seals, they cover the new rows afterwards.
    """
    layout = pool.layout
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"kv_write: layer must be in [0, {layout.num_layers}), got {layer}")
    rows = sizes("kv_write", "k", k, 3)[0]
    k_stride = check_rows("kv_write", "k", k, (rows, layout.num_kv_heads, layout.head_dim), backend)
    if (v is None) != (layout.value_index(layer) < 0):
        raise KernelError(f"kv_write: layer {layer} {'has values' if v is None else 'has no values'}")
    v_shape = (rows, layout.num_kv_heads, layout.v_dim)
    v_stride = 0 if v is None else check_rows("kv_write", "v", v, v_shape, backend)
    check_tensor("kv_write", "slots", slots, torch.int64, (rows,), backend)
    check_pool("kv_write", pool, backend)
    # A look at a GPU's numbers would wait for it: there the kernel skips such a slot.
    if rows and backend is not Backend.GPU and int(slots.numpy().max()) >= layout.num_pages * layout.page_size:
        raise KernelError("kv_write: slots name a page outside the pool")
    if backend is Backend.REF:
        kv_write_ref(k, v, slots, pool, layer)
        return
    if backend is Backend.GPU:
        if rows:
            from kernels.kv_write.gpu import kv_write_gpu

            kv_write_gpu(k, v, slots, pool, layer)
        return
    from kernels import _native

    _native.kv_write(
        k.data_ptr(), k_stride, 0 if v is None else v.data_ptr(), v_stride, slots.data_ptr(), rows, native_layer(pool, layer)
    )  # fmt: skip
