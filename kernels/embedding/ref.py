"""Rows of a matrix, dequantized, in plain torch."""

import torch

from kernels.weights import Weight


def embedding_ref(ids: torch.Tensor, w: Weight) -> torch.Tensor:
    """ids int64 [T] -> float32 [T, K]."""
    return w.gather_rows(ids)
