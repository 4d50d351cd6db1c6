"""Quantizing keys and values, scattering them into pages and keeping the pages' seals up to date, in one launch.

A program writes one row of one head and adds the change, new words minus old ones, to both sums of the page's seal: atomically, since
other programs write other rows of the page. Sums modulo 2^32 don't depend on the order. Each slot may be named once in a call: two programs
that write one slot would both take the same words for the old ones. A step's slots are those of different (sequence, position) pairs in pages
that one sequence writes to, so none comes twice.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT
from kernels.gpu.narrow_floats import to_bfloat16, to_e4m3, to_float16
from kernels.gpu.seals import seal_arguments, tag_place
from kernels.kv_pool import KvPool


@triton.jit
def _weight(stored, element, TYPE: tl.constexpr):
    """What a stored element stands for in its word: 16 bits are the word, 8 bits its low or high byte."""
    if TYPE == "fp8":
        high = stored.to(tl.int8, bitcast=True).to(tl.int32) * 256
        result = tl.where(element % 2 == 0, stored.to(tl.int32), high)
    else:
        result = stored.to(tl.int32)
    return result


@triton.jit
def _write_side(
    source, target, scale, keys, element, offset, DIM: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr, SEALED: tl.constexpr
):  # fmt: skip
    """Write a row's elements; returns by how much that changes the sums of the page's part, 0 if it isn't sealed."""
    is_there = element < DIM
    scaled = tl.math.div_rn(tl.load(source + element, mask=is_there, other=0.0), scale)
    if TYPE == "fp8":
        code = to_e4m3(scaled)
    elif TYPE == "fp16":
        code = to_float16(scaled)
    else:
        code = to_bfloat16(scaled)
    a, b = 0, 0
    if SEALED:
        old = tl.load(target + element, mask=is_there, other=0)
        change = _weight(code, element, TYPE) - _weight(old, element, TYPE)
        per_word: tl.constexpr = 2 if TYPE == "fp8" else 1
        words: tl.constexpr = DIM // per_word
        key = keys + offset * words + element // per_word
        a = tl.sum(change * tl.load(key, mask=is_there, other=0).to(tl.int32), axis=0)
        b = tl.sum(change * tl.load(key + PAGE * words, mask=is_there, other=0).to(tl.int32), axis=0)
    tl.store(target + element, code, mask=is_there)
    return a, b


@triton.jit(do_not_specialize=["layer"])
def _kv_write(
    k, v, slots, pool_k, pool_v, k_scale, v_scale, k_stride, v_stride, num_slots, layer, seals,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr, SEALED: tl.constexpr,
):  # fmt: skip
    """One row's key and value of one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        if slot < num_slots:
            page, offset = slot // PAGE, (slot % PAGE).to(tl.int32)
            place = (page * HEADS + head) * PAGE + offset
            k_keys, v_keys = pool_k, pool_v
            if SEALED:
                k_keys, v_keys = seals.k_words, seals.v_words
            source, target = k + row * k_stride + head * K_DIM, pool_k + place * K_DIM
            element, scale = tl.arange(0, K_PADDED), tl.load(k_scale + head)
            a, b = _write_side(source, target, scale, k_keys, element, offset, K_DIM, PAGE, TYPE, SEALED)
            if V_DIM > 0:
                source, target = v + row * v_stride + head * V_DIM, pool_v + place * V_DIM
                element, scale = tl.arange(0, V_PADDED), tl.load(v_scale + head)
                v_a, v_b = _write_side(source, target, scale, v_keys, element, offset, V_DIM, PAGE, TYPE, SEALED)
                a += v_a
                b += v_b
            if SEALED:
                rows = seals.rows + 2 * offset
                tag = tag_place(seals, page, layer, head, HEADS)
                tl.atomic_add(tag, a + (tl.load(rows + 2) - tl.load(rows)), sem="relaxed")
                tl.atomic_add(tag + 1, b + (tl.load(rows + 3) - tl.load(rows + 1)), sem="relaxed")


def _words(stored: torch.Tensor, pool: KvPool) -> torch.Tensor:
    """Stored elements as the integers that the kernel makes of numbers."""
    return stored if pool.layout.dtype == "fp8" else stored.view(torch.int16)


def kv_write_gpu(k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, pool: KvPool, layer: int) -> None:
    """Store k, v float32 [T, kv_heads, D], rows equally far apart; a slot outside the pool stores nothing. Arguments have been checked."""
    layout, values = pool.layout, pool.values_of(layer)
    pool_k = _words(pool.k_rows[layer], pool)
    pool_v, v_dim = (pool_k, 0) if values is None else (_words(values, pool), layout.v_dim)
    is_sealed = pool.seals is not None
    _kv_write[(len(slots), layout.num_kv_heads)](
        k, k if v is None else v, slots, pool_k, pool_v, pool.k_scale[layer], pool.v_scale[layer],
        k.stride(0), 0 if v is None else v.stride(0), layout.num_pages * layout.page_size, layer,
        seal_arguments(pool) if is_sealed else None,
        HEADS=layout.num_kv_heads, K_DIM=layout.head_dim, K_PADDED=triton.next_power_of_2(layout.head_dim),
        V_DIM=v_dim, V_PADDED=triton.next_power_of_2(max(v_dim, 1)),
        PAGE=layout.page_size, TYPE=layout.dtype, SEALED=is_sealed, num_warps=1, **EXACT,
    )  # fmt: skip
