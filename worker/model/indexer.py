"""The indexer of sparse attention: few small heads choose the positions that a layer's attention looks at (DeepSeek-AI, DeepSeek-V3.2-Exp, 2025).

Layers without an indexer take the choice of the last one before them (IndexShare).
"""

from dataclasses import dataclass

import torch

from kernels.backend import Backend, device_of
from kernels.indexer_topk import indexer_topk
from kernels.kv_pool import KvPool
from kernels.layer_norm import layer_norm
from kernels.rotary import rotary
from worker.model.checkpoint import Checkpoint
from worker.model.projection import Projection
from worker.model.step import StepInput
from worker.model.tensors import permuted, placed
from worker.model.workspace import Buffer, Workspace

INDEXER_NAMES = {
    "index_q": "model.layers.{layer}.self_attn.indexer.wq_b.weight",
    "index_k": "model.layers.{layer}.self_attn.indexer.wk.weight",
    "index_k_norm": "model.layers.{layer}.self_attn.indexer.k_norm.weight",
    "index_k_norm_bias": "model.layers.{layer}.self_attn.indexer.k_norm.bias",
    "index_weights": "model.layers.{layer}.self_attn.indexer.weights_proj.weight",
}
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Selection:
    """How many positions a row looks at, and the memory for them.

    No part but an indexer writes to this memory, so that the choice outlives the layer that made it.
    """

    count: int

    @property
    def buffer(self) -> Buffer:
        """int32 [rows, count], ascending, -1 in places that are left."""
        return Buffer("selected", (self.count,), torch.int32)


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer."""

    layer: int
    num_heads: int
    head_dim: int
    q: Projection
    k: Projection
    weights: Projection
    norm: torch.Tensor
    norm_bias: torch.Tensor
    rotary_table: torch.Tensor  # the first dimensions of a head are rotated
    q_buffer: Buffer
    k_buffer: Buffer
    weights_buffer: Buffer
    backend: Backend

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, layer: int, table: torch.Tensor, turned: torch.Tensor, backend: Backend
    ) -> "Indexer":
        """The indexer of a layer; `turned` is where to find each rotated row of a head."""
        config = checkpoint.config
        assert config.latent is not None
        assert config.latent.indexer is not None
        assert config.latent.q_rank is not None
        sizes = config.latent.indexer
        order = torch.cat([turned, torch.arange(len(turned), sizes.head_dim)])
        all_heads = (torch.arange(sizes.num_heads)[:, None] * sizes.head_dim + order).flatten()
        q = permuted(
            checkpoint.matrix("index_q", layer, (sizes.num_heads * sizes.head_dim, config.latent.q_rank)), all_heads
        )
        k = permuted(checkpoint.matrix("index_k", layer, (sizes.head_dim, config.hidden_size)), order)
        names = {role: f"{checkpoint.label}: {checkpoint.tensor_name(role, layer)}" for role in ("index_q", "index_k")}
        return cls(
            layer=layer,
            num_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            q=Projection((placed([q], names["index_q"], backend, checkpoint.memory),), None, backend),
            k=Projection((placed([k], names["index_k"], backend, checkpoint.memory),), None, backend),
            weights=Projection.load(
                checkpoint, layer, {"index_weights": (sizes.num_heads, config.hidden_size)}, backend
            ),
            norm=checkpoint.vector("index_k_norm", layer, sizes.head_dim)[order].to(device_of(backend)),
            norm_bias=checkpoint.vector("index_k_norm_bias", layer, sizes.head_dim)[order].to(device_of(backend)),
            rotary_table=table,
            q_buffer=Buffer("index_q", (sizes.num_heads, sizes.head_dim)),
            k_buffer=Buffer("index_k", (sizes.head_dim,)),
            weights_buffer=Buffer("index_weights", (sizes.num_heads,)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return self.q_buffer, self.k_buffer, self.weights_buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.q.nbytes + self.k.nbytes + self.weights.nbytes

    def keys(self, x: torch.Tensor, step: StepInput, work: Workspace) -> torch.Tensor:
        """x float32 [T, hidden] -> the rows' keys, float32 [T, 1, head_dim]."""
        k = self.k(x, work[self.k_buffer])
        layer_norm(k, self.norm, self.norm_bias, _NORM_EPS, out=k, backend=self.backend)
        self._rotate(k[:, None], step)
        return k[:, None]

    def choose(
        self, x: torch.Tensor, small: torch.Tensor, out: torch.Tensor, step: StepInput, pool: KvPool, work: Workspace
    ) -> None:
        """From hidden states x float32 [T, hidden] and the small vectors of the queries float32 [T, q_rank]: positions, int32 [T, count].

        Factors that all scores share are left out: they change no order.
        """
        q, weights = work[self.q_buffer], work[self.weights_buffer]
        self.q(small, q.flatten(1))
        self._rotate(q, step)
        self.weights(x, weights)
        indexer_topk(
            q,
            weights,
            pool,
            self.layer,
            step.rows,
            out.shape[1],
            seal_check=step.seal_check,
            out=out,
            backend=self.backend,
        )

    def _rotate(self, heads: torch.Tensor, step: StepInput) -> None:
        rotary(heads[:, :, : 2 * self.rotary_table.shape[2]], step.positions, self.rotary_table, backend=self.backend)
