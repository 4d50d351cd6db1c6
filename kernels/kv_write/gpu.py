"""Quantizing keys and values and scattering them into pages, in one launch for both."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT
from kernels.gpu.narrow_floats import to_bfloat16, to_e4m3, to_float16
from kernels.kv_pool import KvPool


@triton.jit
def _write_side(source, target, scale, place, element, is_there, TYPE: tl.constexpr):
    scaled = tl.math.div_rn(tl.load(source, mask=is_there, other=0.0), scale)
    if TYPE == "fp8":
        code = to_e4m3(scaled)
    elif TYPE == "fp16":
        code = to_float16(scaled)
    else:
        code = to_bfloat16(scaled)
    tl.store(target + place + element, code, mask=is_there)


@triton.jit
def _kv_write(
    k, v, slots, pool_k, pool_v, k_scale, v_scale, k_stride, v_stride, num_slots,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One row's key and value of one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        if slot < num_slots:
            place = (slot // PAGE * HEADS + head) * PAGE + slot % PAGE
            element = tl.arange(0, K_PADDED)
            source = k + row * k_stride + head * K_DIM + element
            _write_side(source, pool_k, tl.load(k_scale + head), place * K_DIM, element, element < K_DIM, TYPE)
            if V_DIM > 0:
                element = tl.arange(0, V_PADDED)
                source = v + row * v_stride + head * V_DIM + element
                _write_side(source, pool_v, tl.load(v_scale + head), place * V_DIM, element, element < V_DIM, TYPE)


def _words(stored: torch.Tensor, pool: KvPool) -> torch.Tensor:
    """Stored elements as the integers that the kernel makes of numbers."""
    return stored if pool.layout.dtype == "fp8" else stored.view(torch.int16)


def kv_write_gpu(k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, pool: KvPool, layer: int) -> None:
    """Store k, v float32 [T, kv_heads, D], rows equally far apart; a slot outside the pool stores nothing. Arguments have been checked."""
    layout, values = pool.layout, pool.values_of(layer)
    pool_k = _words(pool.k_rows[layer], pool)
    pool_v, v_dim = (pool_k, 0) if values is None else (_words(values, pool), layout.v_dim)
    _kv_write[(len(slots), layout.num_kv_heads)](
        k, k if v is None else v, slots, pool_k, pool_v, pool.k_scale[layer], pool.v_scale[layer],
        k.stride(0), 0 if v is None else v.stride(0), layout.num_pages * layout.page_size,
        HEADS=layout.num_kv_heads, K_DIM=layout.head_dim, K_PADDED=triton.next_power_of_2(layout.head_dim),
        V_DIM=v_dim, V_PADDED=triton.next_power_of_2(max(v_dim, 1)),
        PAGE=layout.page_size, TYPE=layout.dtype, num_warps=1, **EXACT,
    )  # fmt: skip
