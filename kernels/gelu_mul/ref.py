"""The gated activation of GeGLU (Shazeer, 2020) in plain torch."""

from functools import partial

import torch

from kernels.elementwise import each


def gelu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with GELU's tanh form (Hendrycks and Gimpel, 2016)."""
    return each(partial(torch.nn.functional.gelu, approximate="tanh"), gate) * up
