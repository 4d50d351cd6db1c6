"""Scales of an FP8 KV cache from a text: for each layer and KV head those with the least squared error over what the model really stores.

The model runs with a bf16 pool and the pool's own contents are looked at, so that this holds for any architecture. A scale leaves twice the room that
the text needed: other texts have larger values, and e4m3 rounds large numbers no worse than small ones.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.kv_pool import E4M3_MAX, KvPool
from worker.model.load import LoadedModel
from worker.quantize.window_run import PAGE_SIZE, run_window

HEADROOM = 2.0
_STEPS = tuple(2 ** (quarter / 4) for quarter in range(12))


def calibrated_kv_scales(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of keys and of values, float32 [num_layers, num_kv_heads] each. `progress` is told of each window, twice."""
    longest = max(len(window) for window in windows)
    pool = KvPool.allocate(loaded.kv_layout(-(-longest // PAGE_SIZE), PAGE_SIZE, "bf16"))
    largest = [torch.zeros_like(pool.k_scale), torch.zeros_like(pool.v_scale)]
    for window in windows:
        for stored, most in zip(_run(loaded, pool, window), largest, strict=True):
            torch.maximum(most, stored.abs().amax(dim=2), out=most)
        progress(1)
    # A head that stores nothing but zeros has some scale too.
    least = [(most * HEADROOM / E4M3_MAX).clamp_(min=2.0**-20) for most in largest]
    errors = [torch.zeros(len(_STEPS), *scale.shape, dtype=torch.float64) for scale in least]
    for window in windows:
        for stored, scale, sums in zip(_run(loaded, pool, window), least, errors, strict=True):
            for number, step in enumerate(_STEPS):
                sums[number] += _squared_error(stored, scale * step)
        progress(1)
    steps = torch.tensor(_STEPS)
    k_scale, v_scale = (scale * steps[sums.argmin(dim=0)] for scale, sums in zip(least, errors, strict=True))
    return k_scale, v_scale


def _run(loaded: LoadedModel, pool: KvPool, window: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a window stores as keys and values, float32 [num_layers, num_kv_heads, elements]."""
    run_window(loaded.model, pool, window, first_logit=len(window))
    num_pages = len(window) // pool.layout.page_size
    keys, stored = (memory[:, :num_pages].transpose(1, 2).flatten(2).float() for memory in (pool.k, pool.v))
    if pool.layout.num_value_layers == pool.layout.num_layers:
        return keys, stored
    # Layers without values store zeros, as it were: some scale they must have.
    values = torch.zeros(*keys.shape[:2], max(stored.shape[2], 1))
    for layer in range(pool.layout.num_layers):
        if (index := pool.layout.value_index(layer)) >= 0:
            values[layer] = stored[index]
    return keys, values


def _squared_error(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.unsqueeze(2)
    codes = (stored / wide).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float().mul_(wide).sub_(stored).square_().sum(dim=2).double()
