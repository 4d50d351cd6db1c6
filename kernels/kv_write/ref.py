"""Quantizing keys and values and scattering them into pages, in plain torch."""

import torch

from kernels.kv_pool import E4M3_MAX, FP16_MAX, KvPool
from kernels.page_seal.ref import add_rows_ref, words_of_pages


def encode(values: torch.Tensor, scale: torch.Tensor, pool: KvPool) -> torch.Tensor:
    """values float32 [T, heads, D] by scale [heads] in the pool's stored form: rounded to nearest even; fp16 is clamped to +-65504 first, e4m3 to +-448."""
    scaled = values / scale.view(1, -1, 1)
    if pool.layout.dtype == "bf16":
        return scaled.to(torch.bfloat16)
    if pool.layout.dtype == "fp16":
        return scaled.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def kv_write_ref(k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, pool: KvPool, layer: int) -> None:
    """Store rows with slot >= 0."""
    before = words_of_pages(pool, layer, slots) if pool.seals is not None else []
    wanted = slots >= 0
    page, offset = slots[wanted] // pool.layout.page_size, slots[wanted] % pool.layout.page_size
    for rows, scale, target in ((k, pool.k_scale, pool.k_rows[layer]), (v, pool.v_scale, pool.values_of(layer))):
        if rows is not None and target is not None:
            target[page, :, offset] = encode(rows[wanted], scale[layer], pool)
    if pool.seals is not None:
        add_rows_ref(pool, pool.seals, layer, slots, before)
