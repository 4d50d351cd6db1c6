"""Rotary grouped-query attention over paged keys and values."""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.head_norm import head_norm
from kernels.kv_pool import KvPool
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.rotary import rotary
from worker.model.checkpoint import Checkpoint
from worker.model.projection import Projection, load_norm
from worker.model.step import StepInput
from worker.model.workspace import Buffer, Workspace


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Factors of queries' and keys' norms, float32 [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """One layer's attention (Ainslie et al., 2023): `num_heads` queries share `num_kv_heads` keys and values."""

    layer: int
    num_heads: int
    num_kv_heads: int
    qkv: Projection
    o: Projection
    norms: HeadNorms | None
    rotary_table: torch.Tensor  # of as many dimensions of a head as are rotated
    window: int | None  # how many keys a query sees
    softmax_scale: float
    qkv_buffer: Buffer  # heads of queries, then of keys, then of values
    attended: Buffer
    backend: Backend

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        table: torch.Tensor,
        backend: Backend,
        local_table: torch.Tensor | None = None,
    ) -> "GroupedQueryAttention":
        """The attention of a layer; the tables hold the angles of all positions, the second one's for layers with a window if it's given."""
        config = checkpoint.config
        hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        shapes = {"q": (heads * dim, hidden), "k": (kv_heads * dim, hidden), "v": (kv_heads * dim, hidden)}
        norms = None
        if config.qk_norm:
            q_norm, k_norm = (load_norm(checkpoint, role, layer, dim, backend) for role in ("q_norm", "k_norm"))
            norms = HeadNorms(q_norm, k_norm, config.rms_eps)
        window = config.windows[layer] if config.windows else None
        return cls(
            layer=layer,
            num_heads=heads,
            num_kv_heads=kv_heads,
            qkv=Projection.load(checkpoint, layer, shapes, backend, has_bias=config.qkv_bias),
            o=Projection.load(checkpoint, layer, {"o": (hidden, heads * dim)}, backend, has_bias=config.o_bias),
            norms=norms,
            rotary_table=table if window is None or local_table is None else local_table,
            window=window,
            softmax_scale=config.softmax_scale or dim**-0.5,
            qkv_buffer=Buffer("qkv", (heads + 2 * kv_heads, dim)),
            attended=Buffer("attended", (heads, dim)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return self.qkv_buffer, self.attended

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.qkv.nbytes + self.o.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor, step: StepInput, pool: KvPool, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]; the rows' keys and values are written first."""
        qkv, attended, num_rows = work[self.qkv_buffer], work[self.attended], work.num_rows
        self.qkv(x, qkv.view(num_rows, -1))
        q, k, v = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.norms is not None:
            head_norm(q, self.norms.q, self.norms.eps, backend=self.backend)
            head_norm(k, self.norms.k, self.norms.eps, backend=self.backend)
        turned = qkv[:, : -self.num_kv_heads, : 2 * self.rotary_table.shape[2]]
        rotary(turned, step.positions, self.rotary_table, backend=self.backend)
        kv_write(k, v, step.slots, pool, self.layer, backend=self.backend)
        paged_attention(
            q, pool, self.layer, step.rows, softmax_scale=self.softmax_scale, window=self.window, seal_check=step.seal_check,
            out=attended, backend=self.backend,
        )  # fmt: skip
        self.o(attended.view(num_rows, -1), out)
