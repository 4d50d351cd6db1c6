"""Root mean square normalization (Zhang and Sennrich, 2019) in plain torch."""

import torch


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x float32 [T, H] -> x / sqrt(mean(x^2) + eps) * weight."""
    return x * torch.rsqrt((x * x).sum(dim=1, keepdim=True) / x.shape[1] + eps) * weight
