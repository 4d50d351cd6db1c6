"""Quantize keys and values, and store them in their pages."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, sizes
from kernels.errors import KernelError
from kernels.kv_pool import KvPool
from kernels.kv_write.ref import kv_write_ref


def kv_write(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: KvPool, layer: int, *, backend: Backend
) -> None:
    """Store k, v float32 [T, kv_heads, D] at slots int64 [T], slot = page * page_size + offset; a negative slot skips its row.

    fp8: value / scale, clamped to +-448, nearest even; NaN is stored as 0x7f, which nothing finite ever is.
    """
    layout = pool.layout
    rows = sizes("kv_write", "k", k, 3)[0]
    shape = (rows, layout.num_kv_heads, layout.head_dim)
    check_tensor("kv_write", "k", k, torch.float32, shape)
    check_tensor("kv_write", "v", v, torch.float32, shape)
    check_tensor("kv_write", "slots", slots, torch.int64, (rows,))
    if rows and int(slots.numpy().max()) >= layout.num_pages * layout.page_size:
        raise KernelError("kv_write: slots name a page outside the pool")
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"kv_write: layer must be in [0, {layout.num_layers}), got {layer}")
    if backend is Backend.REF:
        kv_write_ref(k, v, slots, pool, layer)
        return
    from kernels import _native

    _native.kv_write(k.data_ptr(), v.data_ptr(), slots.data_ptr(), rows, *native_layer(pool, layer))


def native_layer(pool: KvPool, layer: int) -> tuple[int, int, int, int, int, int, int, int, int]:
    """One layer of the pool as the native module takes it: four addresses, four sizes, the element type."""
    layout = pool.layout
    return (
        pool.k.data_ptr() + layer * pool.k.stride(0) * layout.element_bytes,
        pool.v.data_ptr() + layer * pool.v.stride(0) * layout.element_bytes,
        pool.k_scale.data_ptr() + 4 * layer * layout.num_kv_heads,
        pool.v_scale.data_ptr() + 4 * layer * layout.num_kv_heads,
        layout.num_pages,
        layout.num_kv_heads,
        layout.page_size,
        layout.head_dim,
        0 if layout.dtype == "bf16" else 1,
    )
