"""Layer normalization (Ba, Kiros and Hinton, 2016) in plain torch."""

import torch


def layer_norm_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x float32 [T, H] -> (x - mean) / sqrt(variance + eps) * weight + bias."""
    centred = x - x.sum(dim=1, keepdim=True) / x.shape[1]
    variance = (centred * centred).sum(dim=1, keepdim=True) / x.shape[1]
    return centred * torch.rsqrt(variance + eps) * weight + bias
