"""The ordinary feed-forward of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.gelu_mul import gelu_mul
from kernels.silu_mul import silu_mul
from worker.model.checkpoint import Checkpoint
from worker.model.projection import Projection
from worker.model.workspace import Buffer, Workspace

_ROLES = {"gate": "gate", "up": "up", "down": "down"}
SHARED_ROLES = {"gate": "shared_gate", "up": "shared_up", "down": "shared_down"}


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """down(activation(gate x) * up x): SwiGLU with SiLU, GeGLU with GELU (Shazeer, 2020)."""

    gate_up: Projection
    down: Projection
    is_gelu: bool
    gate_up_buffer: Buffer
    product: Buffer
    backend: Backend

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        size: int,
        backend: Backend,
        *,
        is_gelu: bool = False,
        roles: Mapping[str, str] = _ROLES,
    ) -> "GatedFeedForward":
        """The feed-forward of a layer, `size` wide inside."""
        hidden, has_bias = checkpoint.config.hidden_size, checkpoint.config.ffn_bias
        wide = {roles["gate"]: (size, hidden), roles["up"]: (size, hidden)}
        return cls(
            gate_up=Projection.load(checkpoint, layer, wide, backend, has_bias=has_bias),
            down=Projection.load(checkpoint, layer, {roles["down"]: (hidden, size)}, backend, has_bias=has_bias),
            is_gelu=is_gelu,
            gate_up_buffer=Buffer("gate_up", (2 * size,)),
            product=Buffer("product", (size,)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return self.gate_up_buffer, self.product

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]."""
        gate_up, product = work[self.gate_up_buffer], work[self.product]
        self.gate_up(x, gate_up)
        activate = gelu_mul if self.is_gelu else silu_mul
        self.down(activate(gate_up, product, backend=self.backend), out)
