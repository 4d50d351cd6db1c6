"""A pool's addresses and sizes as the native module takes them."""

from functools import lru_cache

from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from kernels.seals import PageSeals

NATIVE_TYPES = {"bf16": 0, "fp8": 1, "fp16": 2}
_NO_SEALS = (0, 0, 0, 0, 0, 0, 0)


def native_layer(pool: KvPool, layer: int) -> tuple[int, ...]:
    """One layer: four addresses, five sizes, the element type, whether keys lie by token, the seals' addresses.

    A layer without values has the size 0 for them, and an address that means nothing.
    """
    index = pool.layout.value_index(layer)
    return _layer(pool, layer, max(index, 0), pool.layout.v_dim if index >= 0 else 0)


def native_pool(pool: KvPool) -> tuple[tuple[int, ...], list[int]]:
    """The first layer, as if it had values, and for each layer the place of its values or -1."""
    return _layer(pool, 0, 0, pool.layout.v_dim), _value_indices(pool.layout)


@lru_cache(maxsize=16)
def _value_indices(layout: KvLayout) -> list[int]:
    return [layout.value_index(layer) for layer in range(layout.num_layers)]


def _layer(pool: KvPool, layer: int, value_index: int, v_dim: int) -> tuple[int, ...]:
    layout = pool.layout
    return (
        pool.k.data_ptr() + layer * pool.k.stride(0) * layout.element_bytes,
        pool.v.data_ptr() + value_index * pool.v.stride(0) * layout.element_bytes,
        pool.k_scale.data_ptr() + 4 * layer * layout.num_kv_heads,
        pool.v_scale.data_ptr() + 4 * layer * layout.num_kv_heads,
        layout.num_pages,
        layout.num_kv_heads,
        layout.page_size,
        layout.head_dim,
        v_dim,
        NATIVE_TYPES[layout.dtype],
        layout.is_latent,
        *(_NO_SEALS if pool.seals is None else _native_seals(pool, pool.seals, layer)),
    )


def _native_seals(pool: KvPool, seals: PageSeals, layer: int) -> tuple[int, ...]:
    heads, keys = pool.layout.num_kv_heads, seals.keys
    return (
        seals.tags.data_ptr() + 8 * layer * pool.layout.num_pages * heads,
        keys.factor.data_ptr() + 8 * layer * heads,
        keys.offset.data_ptr() + 8 * layer * heads,
        keys.scales.data_ptr(),
        keys.rows.data_ptr(),
        keys.k_words.data_ptr(),
        keys.v_words.data_ptr(),
    )
