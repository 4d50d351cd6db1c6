"""Root mean square normalization of queries' and keys' heads (Henry et al., 2020; Dehghani et al., 2023) in plain torch."""

import torch


def head_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x float32 [T, heads, D] -> x / sqrt(mean(x^2) + eps) * weight, in place."""
    x.copy_(x * torch.rsqrt((x * x).sum(dim=2, keepdim=True) / x.shape[2] + eps) * weight)
