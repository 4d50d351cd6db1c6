"""Rotary position embedding (Su et al., 2021), pairs (i, i + D/2), in plain torch."""

import torch


def rotary_table(inv_freq: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Cosines and sines, float32 [num_positions, 2, D/2], from inverse frequencies [D/2]; angles in float64."""
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * inv_freq.double()
    return torch.stack([angles.cos(), angles.sin()], dim=1).float().contiguous()


def rotary_ref(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate x float32 [T, heads, D] in place."""
    cosines, sines = table[positions.long()].unsqueeze(2).unbind(dim=1)  # [T, 1, D/2]
    first, second = x.chunk(2, dim=2)
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=2)
    x.copy_(rotated)
