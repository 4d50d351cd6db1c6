"""torch's functions of single elements, with bits that depend on the element alone."""

from collections.abc import Callable

import torch

# Torch computes what is left after whole vectors (two at a time, of 16 numbers at most) by other instructions, whose last bits differ.
_WHOLE_VECTORS = 64


def each(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of each element of x float32 [..., N], computed in whole vectors: an element has the same bits wherever it stands."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % _WHOLE_VECTORS))
    return function(padded)[..., :width].contiguous()
