"""Rows of a matrix, in plain torch."""

import torch


def take_rows_ref(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x float32 [T, H], rows int64 [R] -> float32 [R, H]."""
    return x[rows]
