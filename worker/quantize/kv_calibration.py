"""Scales of an FP8 KV cache from a text: for each layer and KV head those with the least squared error over what the model really stores.

The model runs with a bf16 pool and the pool's own contents are looked at, so that this holds for any architecture. A scale leaves twice the room that
the text needed: other texts have larger values, and e4m3 rounds large numbers no worse than small ones.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.kv_pool import E4M3_MAX, KvPool
from worker.model.load import LoadedModel
from worker.quantize.errors import QuantizeError
from worker.quantize.window_run import PAGE_SIZE, run_window

HEADROOM = 2.0
_STEPS = tuple(2 ** (quarter / 4) for quarter in range(12))


def calibrated_kv_scales(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of keys and of values, float32 [num_layers, num_kv_heads] each. `progress` is told of each window, twice. Raises QuantizeError."""
    longest = max(len(window) for window in windows)
    if longest > loaded.config.context_length:
        raise QuantizeError(
            f"calibration takes windows of {longest} tokens, the model's context is {loaded.config.context_length}"
        )
    pool = KvPool.allocate(loaded.kv_layout(-(-longest // PAGE_SIZE), PAGE_SIZE, "bf16"))
    sides = [_Side(pool.k), _Side(pool.v)]
    for window in windows:
        for side, stored in zip(sides, _run(loaded, pool, window), strict=True):
            side.see(stored)
        progress(1)
    for window in windows:
        for side, stored in zip(sides, _run(loaded, pool, window), strict=True):
            side.judge(stored)
        progress(1)
    layout = pool.layout
    v_scale = torch.ones_like(pool.v_scale)  # also of layers without values
    v_scale[[layer for layer in range(layout.num_layers) if layout.value_index(layer) >= 0]] = sides[1].best()
    return sides[0].best(), v_scale


class _Side:
    """Keys or values: first the largest of each layer and head, then the error that each scale would make."""

    def __init__(self, memory: torch.Tensor) -> None:
        shape = memory.shape[0], memory.shape[2]
        self._largest = torch.zeros(shape)
        self._errors = torch.zeros(len(_STEPS), *shape, dtype=torch.float64)

    def see(self, stored: torch.Tensor) -> None:
        """stored float32 [num_layers, num_kv_heads, elements]. Raises QuantizeError for what is not finite."""
        if not bool(torch.isfinite(stored).all()):
            raise QuantizeError("the model's keys or values are not finite on the calibration text")
        if stored.numel():
            torch.maximum(self._largest, stored.abs().amax(dim=2), out=self._largest)

    def judge(self, stored: torch.Tensor) -> None:
        """The same again, when all has been seen."""
        for number, step in enumerate(_STEPS):
            self._errors[number] += _squared_error(stored, self._least() * step)

    def best(self) -> torch.Tensor:
        """float32 [num_layers, num_kv_heads]."""
        return self._least() * torch.tensor(_STEPS)[self._errors.argmin(dim=0)]

    def _least(self) -> torch.Tensor:
        # A head that stores nothing but zeros has some scale too.
        return (self._largest * HEADROOM / E4M3_MAX).clamp_(min=2.0**-20)


def _run(loaded: LoadedModel, pool: KvPool, window: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a window stores as keys, and as values in the layers that have some: float32 [layers, num_kv_heads, elements] each."""
    run_window(loaded.model, pool, window, first_logit=len(window))
    num_pages = len(window) // pool.layout.page_size
    keys, stored = (memory[:, :num_pages].transpose(1, 2).flatten(2).float() for memory in (pool.k, pool.v))
    return keys, stored


def _squared_error(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.unsqueeze(2)
    codes = (stored / wide).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float().mul_(wide).sub_(stored).square_().sum(dim=2).double()
