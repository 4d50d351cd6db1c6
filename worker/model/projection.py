"""Matrices and norms of a model, and how they come out of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.add_bias import add_bias
from kernels.backend import Backend, device_of
from kernels.matmul import matmul
from kernels.weights import AnyWeight
from worker.model.checkpoint import Checkpoint
from worker.model.tensors import can_stack, placed


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that share their input; they're one matrix where their formats allow it."""

    parts: tuple[AnyWeight, ...]
    bias: torch.Tensor | None  # float32 [sum of outs]
    backend: Backend

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        shapes: Mapping[str, tuple[int, int]],
        backend: Backend,
        *,
        has_bias: bool = False,
    ) -> "Projection":
        """The matrices of these roles, [out, in] each, one below the other; a bias has the role of its matrix and `_bias`."""
        parts = [checkpoint.matrix(role, layer, shape) for role, shape in shapes.items()]
        sources = [f"{checkpoint.label}: {checkpoint.tensor_name(role, layer)}" for role in shapes]
        biases = [checkpoint.vector(f"{role}_bias", layer, out) for role, (out, _) in shapes.items() if has_bias]
        bias = torch.cat(biases).to(device_of(backend)) if biases else None
        if can_stack(parts):
            return cls((placed(parts, sources[0], backend, checkpoint.memory),), bias, backend)
        separate = zip(parts, sources, strict=True)
        return cls(
            tuple(placed([part], source, backend, checkpoint.memory) for part, source in separate), bias, backend
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x float32 [T, in] -> out float32 [T, sum of outs]."""
        first = 0
        for part in self.parts:
            matmul(x, part, out[:, first : first + part.shape[0]], backend=self.backend)
            first += part.shape[0]
        if self.bias is not None:
            add_bias(out, self.bias, backend=self.backend)
        return out


def load_matrix(checkpoint: Checkpoint, role: str, shape: tuple[int, int], backend: Backend) -> AnyWeight:
    """A matrix that belongs to no layer."""
    rows = checkpoint.matrix(role, None, shape)
    source = f"{checkpoint.label}: {checkpoint.tensor_name(role, None)}"
    return placed([rows], source, backend, checkpoint.memory)


def load_norm(checkpoint: Checkpoint, role: str, layer: int | None, size: int, backend: Backend) -> torch.Tensor:
    """The factors of a norm, float32 [size]."""
    return (checkpoint.vector(role, layer, size) + checkpoint.config.norm_offset).to(device_of(backend))
