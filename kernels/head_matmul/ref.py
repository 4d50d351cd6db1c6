"""A product for each head in plain torch."""

import torch


def head_matmul_ref(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x float32 [T, heads, K], matrices float32 [heads, N, K] -> float32 [T, heads, N]; a row at a time, so that it knows no other."""
    return (
        torch.stack([(matrices * row.unsqueeze(1)).sum(dim=2) for row in x])
        if len(x)
        else x.new_empty(0, *matrices.shape[:2])
    )
