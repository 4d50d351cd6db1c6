"""Scales of 8-bit keys and values that come with a checkpoint."""

from dataclasses import dataclass

import torch

from worker.model.errors import ModelError

SMALLEST, LARGEST = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class KvScales:
    """What a stored key or value is multiplied with: float32 [num_layers, num_kv_heads], finite and positive."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def from_numbers(
        cls, found: dict[tuple[int, str], torch.Tensor], num_layers: int, num_kv_heads: int, source: str
    ) -> "KvScales":
        """From one number, or one for each head, by layer and side ("k", "v"). Raises ModelError if one is missing or can't be a scale."""
        sides = {side: torch.empty(num_layers, num_kv_heads) for side in ("k", "v")}
        for side, scales in sides.items():
            for layer in range(num_layers):
                numbers = found.get((layer, side))
                if numbers is None:
                    raise ModelError(f"{source}: there are KV scales, but no {side}_scale of layer {layer}")
                if numbers.numel() not in (1, num_kv_heads):
                    raise ModelError(
                        f"{source}: {side}_scale of layer {layer} has {numbers.numel()} numbers, expected 1 or {num_kv_heads}"
                    )
                scales[layer] = numbers.float().flatten()
                if not bool(((scales[layer] >= SMALLEST) & (scales[layer] <= LARGEST)).all()):
                    raise ModelError(f"{source}: {side}_scale of layer {layer} is not between {SMALLEST} and {LARGEST}")
        return cls(**sides)
