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
    k, v, slots, pool_k, pool_v, k_scale, v_scale, row_stride, num_slots,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One row's key and value of one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        if slot < num_slots:
            element = tl.arange(0, PADDED)
            source = row * row_stride + head * DIM + element
            place = ((slot // PAGE * HEADS + head) * PAGE + slot % PAGE) * DIM
            _write_side(k + source, pool_k, tl.load(k_scale + head), place, element, element < DIM, TYPE)
            _write_side(v + source, pool_v, tl.load(v_scale + head), place, element, element < DIM, TYPE)


def stored_words(pool: KvPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values as the integers that the kernel makes of numbers."""
    k, v = pool.k_rows[layer], pool.v[layer]
    return (k, v) if pool.layout.dtype == "fp8" else (k.view(torch.int16), v.view(torch.int16))


def kv_write_gpu(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: KvPool, layer: int) -> None:
    """Store k, v float32 [T, kv_heads, D], rows equally far apart; a slot outside the pool stores nothing. Arguments have been checked."""
    layout = pool.layout
    pool_k, pool_v = stored_words(pool, layer)
    _kv_write[(len(slots), layout.num_kv_heads)](
        k, v, slots, pool_k, pool_v, pool.k_scale[layer], pool.v_scale[layer],
        k.stride(0), layout.num_pages * layout.page_size,
        HEADS=layout.num_kv_heads, DIM=layout.head_dim, PADDED=triton.next_power_of_2(layout.head_dim),
        PAGE=layout.page_size, TYPE=layout.dtype, num_warps=1, **EXACT,
    )  # fmt: skip
