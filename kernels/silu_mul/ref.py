"""The gated activation of SwiGLU (Shazeer, 2020) in plain torch."""

import torch

from kernels.elementwise import each


def silu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return each(torch.nn.functional.silu, gate) * up
