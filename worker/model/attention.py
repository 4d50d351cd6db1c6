"""Rotary grouped-query attention over paged keys and values."""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.kv_pool import KvPool
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.rotary import rotary
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.projection import Projection
from worker.model.step import StepInput
from worker.model.workspace import Buffer, Workspace


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """One layer's attention (Ainslie et al., 2023): `num_heads` queries share `num_kv_heads` keys and values."""

    layer: int
    num_heads: int
    num_kv_heads: int
    qkv: Projection
    o: Projection
    rotary_table: torch.Tensor
    softmax_scale: float
    qkv_buffer: Buffer  # heads of queries, then of keys, then of values
    attended: Buffer
    backend: Backend

    @classmethod
    def load(cls, checkpoint: Checkpoint, layer: int, table: torch.Tensor, backend: Backend) -> "GroupedQueryAttention":
        """The attention of a layer; `table` holds the angles of all positions (`rotary_table`)."""
        config = checkpoint.config
        hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        shapes = {"q": (heads * dim, hidden), "k": (kv_heads * dim, hidden), "v": (kv_heads * dim, hidden)}
        return cls(
            layer=layer,
            num_heads=heads,
            num_kv_heads=kv_heads,
            qkv=Projection.load(checkpoint, layer, shapes, backend),
            o=Projection.load(checkpoint, layer, {"o": (hidden, heads * dim)}, backend),
            rotary_table=table,
            softmax_scale=dim**-0.5,
            qkv_buffer=Buffer("qkv", (heads + 2 * kv_heads, dim)),
            attended=Buffer("attended", (heads, dim)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return self.qkv_buffer, self.attended

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices."""
        return self.qkv.parts + self.o.parts

    def __call__(self, x: torch.Tensor, out: torch.Tensor, step: StepInput, pool: KvPool, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]; the rows' keys and values are written first."""
        qkv, attended, num_rows = work[self.qkv_buffer], work[self.attended], work.num_rows
        self.qkv(x, qkv.view(num_rows, -1))
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        rotary(qkv[:, : -self.num_kv_heads], step.positions, self.rotary_table, backend=self.backend)
        kv_write(k, v, step.slots, pool, self.layer, backend=self.backend)
        paged_attention(
            q, pool, self.layer, step.rows, softmax_scale=self.softmax_scale, seal_check=step.seal_check,
            out=attended, backend=self.backend,
        )  # fmt: skip
        self.o(attended.view(num_rows, -1), out)
