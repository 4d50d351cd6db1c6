"""The gated activation of GeGLU (Shazeer, 2020) in plain torch."""

import torch


def gelu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with GELU's tanh form (Hendrycks and Gimpel, 2016)."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
