"""Feed-forward parts of a layer."""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.silu_mul import silu_mul
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.projection import Projection
from worker.model.workspace import Buffer, Workspace


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """down(silu(gate x) * up x), SwiGLU (Shazeer, 2020)."""

    gate_up: Projection
    down: Projection
    gate_up_buffer: Buffer
    product: Buffer
    backend: Backend

    @classmethod
    def load(cls, checkpoint: Checkpoint, layer: int, size: int, backend: Backend) -> "GatedFeedForward":
        """The feed-forward of a layer, `size` wide inside."""
        hidden = checkpoint.config.hidden_size
        return cls(
            gate_up=Projection.load(checkpoint, layer, {"gate": (size, hidden), "up": (size, hidden)}, backend),
            down=Projection.load(checkpoint, layer, {"down": (hidden, size)}, backend),
            gate_up_buffer=Buffer("gate_up", (2 * size,)),
            product=Buffer("product", (size,)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return self.gate_up_buffer, self.product

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices."""
        return self.gate_up.parts + self.down.parts

    def __call__(self, x: torch.Tensor, out: torch.Tensor, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]."""
        gate_up, product = work[self.gate_up_buffer], work[self.product]
        self.gate_up(x, gate_up)
        self.down(silu_mul(gate_up, product, backend=self.backend), out)
