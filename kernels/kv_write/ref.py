"""Quantizing keys and values and scattering them into pages, in plain torch."""

import torch

from kernels.kv_pool import E4M3_MAX, KvPool


def encode(values: torch.Tensor, scale: torch.Tensor, pool: KvPool) -> torch.Tensor:
    """values float32 [T, heads, D] by scale [heads] in the pool's stored form: rounded to nearest even, e4m3 clamped to +-448 first."""
    scaled = values / scale.view(1, -1, 1)
    if pool.layout.dtype == "bf16":
        return scaled.to(torch.bfloat16)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def kv_write_ref(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: KvPool, layer: int) -> None:
    """Store rows with slot >= 0."""
    wanted = slots >= 0
    page, offset = slots[wanted] // pool.layout.page_size, slots[wanted] % pool.layout.page_size
    for values, scale, target in ((k, pool.k_scale, pool.k), (v, pool.v_scale, pool.v)):
        target[layer, page, :, offset] = encode(values[wanted], scale[layer], pool)
