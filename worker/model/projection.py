"""Matrices of a model, and how they come out of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.matmul import matmul
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.tensors import can_stack, packed, stacked


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that share their input; they're one matrix where their formats allow it."""

    parts: tuple[Weight, ...]
    backend: Backend

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, layer: int, shapes: Mapping[str, tuple[int, int]], backend: Backend
    ) -> "Projection":
        """The matrices of these roles, [out, in] each, one below the other."""
        parts = [checkpoint.matrix(role, layer, shape) for role, shape in shapes.items()]
        sources = [f"{checkpoint.label}: {checkpoint.tensor_name(role, layer)}" for role in shapes]
        if can_stack(parts):
            return cls((packed(stacked(parts), sources[0]),), backend)
        return cls(tuple(packed(part, source) for part, source in zip(parts, sources, strict=True)), backend)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x float32 [T, in] -> out float32 [T, sum of outs]."""
        first = 0
        for part in self.parts:
            matmul(x, part, out[:, first : first + part.shape[0]], backend=self.backend)
            first += part.shape[0]
        return out


def load_matrix(checkpoint: Checkpoint, role: str, shape: tuple[int, int]) -> Weight:
    """A matrix that belongs to no layer."""
    rows = checkpoint.matrix(role, None, shape)
    return packed(rows, f"{checkpoint.label}: {checkpoint.tensor_name(role, None)}")
