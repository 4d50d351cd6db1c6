"""Scales of 8-bit keys and values that come with a checkpoint."""

import torch

from worker.kv_scales import KvScales
from worker.model.errors import ModelError

SMALLEST, LARGEST = 1e-9, 1e9


def kv_scales(found: dict[tuple[int, str], torch.Tensor], num_layers: int, num_kv_heads: int, source: str) -> KvScales:
    """From one number, or one for each head, by layer and side ("k", "v"). Raises ModelError if one is missing or can't be a scale."""
    sides = {side: torch.empty(num_layers, num_kv_heads) for side in ("k", "v")}
    for side, scales in sides.items():
        for layer in range(num_layers):
            numbers, name = found.get((layer, side)), f"{side}_scale of layer {layer}"
            if numbers is None:
                raise ModelError(f"{source}: there are KV scales, but no {name}")
            scales[layer] = numbers.float().flatten()
            if not bool(((scales[layer] >= SMALLEST) & (scales[layer] <= LARGEST)).all()):
                raise ModelError(f"{source}: {name} is not between {SMALLEST} and {LARGEST}")
    return KvScales(sides["k"], sides["v"], "checkpoint")
