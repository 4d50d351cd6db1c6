"""Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024) in its absorbed form over paged latent vectors.

A token is stored as one latent vector and one rotated part, for all heads alike. Instead of making keys and values of it, each head's key
matrix is applied to the query, and its value matrix to the weighted sum of latent vectors: (K c) . q = c . (K^T q).
"""

from dataclasses import dataclass

import torch

from kernels.backend import Backend, device_of
from kernels.head_matmul import HeadWeights, head_matmul
from kernels.head_norm import head_norm
from kernels.kv_layout import KvDtype, KvLayout
from kernels.kv_pool import KvPool
from kernels.kv_write import kv_write
from kernels.mla_attention import mla_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from worker.model.checkpoint import Checkpoint
from worker.model.config import LatentConfig, ModelConfig
from worker.model.indexer import INDEXER_NAMES, Indexer, Selection
from worker.model.projection import Projection, load_norm
from worker.model.step import StepInput
from worker.model.tensors import packed, permuted, placed
from worker.model.workspace import Buffer, Workspace

LATENT_NAMES = {
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "q_down": "model.layers.{layer}.self_attn.q_a_proj.weight",
    "q_down_bias": "model.layers.{layer}.self_attn.q_a_proj.bias",
    "q_down_norm": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    "q_up": "model.layers.{layer}.self_attn.q_b_proj.weight",
    "kv_down": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
    "kv_down_bias": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.bias",
    "kv_down_norm": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
    "kv_up": "model.layers.{layer}.self_attn.kv_b_proj.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "o_bias": "model.layers.{layer}.self_attn.o_proj.bias",
    **INDEXER_NAMES,
}
_NORM_EPS = 1e-6  # of the norms of latent vectors, whatever the others' is


def latent_layout(config: ModelConfig, num_pages: int, page_size: int, dtype: KvDtype) -> KvLayout:
    """A pool of latent vectors with their rotated parts; the indexer's keys are kept as values, in the layers that have an indexer."""
    assert config.latent is not None
    indexer = config.latent.indexer
    return KvLayout(
        num_layers=config.num_layers,
        num_pages=num_pages,
        num_kv_heads=1,
        head_dim=config.latent.kv_rank + config.latent.rope_dim,
        page_size=page_size,
        dtype=dtype,
        value_dim=0 if indexer is None else indexer.head_dim,
        value_layers=None if indexer is None else indexer.layers,
        is_latent=True,
    )


@dataclass(frozen=True, slots=True)
class Queries:
    """From hidden states to queries: straight, or through a smaller vector that is normalized."""

    down: Projection | None
    norm: torch.Tensor | None
    up: Projection
    small: Buffer | None
    wide: Buffer  # all heads' parts without a position, then all heads' rotated parts

    @classmethod
    def load(cls, checkpoint: Checkpoint, layer: int, backend: Backend) -> "Queries":
        """A layer's; rows come in the order of `wide`."""
        config, latent = checkpoint.config, _latent(checkpoint)
        width = config.num_heads * (latent.nope_dim + latent.rope_dim)
        order = _query_order(config.num_heads, latent)
        wide = Buffer("latent_q", (width,))
        if latent.q_rank is None:
            up = _ordered(checkpoint, layer, "q", (width, config.hidden_size), order, backend)
            return cls(None, None, up, None, wide)
        down_shape = {"q_down": (latent.q_rank, config.hidden_size)}
        return cls(
            down=Projection.load(checkpoint, layer, down_shape, backend, has_bias=config.qkv_bias),
            norm=load_norm(checkpoint, "q_down_norm", layer, latent.q_rank, backend),
            up=_ordered(checkpoint, layer, "q_up", (width, latent.q_rank), order, backend),
            small=Buffer("latent_q_small", (latent.q_rank,)),
            wide=wide,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return (self.wide,) if self.small is None else (self.small, self.wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.up.nbytes + (0 if self.down is None else self.down.nbytes)

    def __call__(self, x: torch.Tensor, work: Workspace, backend: Backend) -> torch.Tensor:
        """x float32 [T, hidden]; fills `wide`, and returns what it is made of."""
        if self.down is not None and self.norm is not None and self.small is not None:
            x = self.down(x, work[self.small])
            rms_norm(x, self.norm, _NORM_EPS, out=x, backend=backend)
        self.up(x, work[self.wide])
        return x


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's attention. With `selection` a row attends to the positions that this layer's indexer, or the last one before, has chosen."""

    layer: int
    num_heads: int
    sizes: LatentConfig
    queries: Queries
    kv_down: Projection
    kv_norm: torch.Tensor
    key_matrices: HeadWeights  # each head's, transposed: [heads, kv_rank, nope_dim]
    value_matrices: HeadWeights  # [heads, v_dim, kv_rank]
    o: Projection
    indexer: Indexer | None
    selection: Selection | None
    rotary_table: torch.Tensor
    softmax_scale: float
    stored: Buffer  # the latent vector, then the rotated part
    absorbed: Buffer
    attended: Buffer
    values: Buffer
    backend: Backend

    @classmethod
    def load(cls, checkpoint: Checkpoint, layer: int, table: torch.Tensor, backend: Backend) -> "LatentAttention":
        """The attention of a layer; the table holds the angles of all positions."""
        config, latent = checkpoint.config, _latent(checkpoint)
        hidden, heads = config.hidden_size, config.num_heads
        stored_dim = latent.kv_rank + latent.rope_dim
        order = torch.cat([torch.arange(latent.kv_rank), latent.kv_rank + half_order(latent)])
        key_matrices, value_matrices = _split_kv_up(checkpoint, layer, backend)
        has_indexer = latent.indexer is not None and layer in latent.indexer.layers
        return cls(
            layer=layer,
            num_heads=heads,
            sizes=latent,
            queries=Queries.load(checkpoint, layer, backend),
            kv_down=_ordered(
                checkpoint, layer, "kv_down", (stored_dim, hidden), order, backend, has_bias=config.qkv_bias
            ),
            kv_norm=load_norm(checkpoint, "kv_down_norm", layer, latent.kv_rank, backend),
            key_matrices=key_matrices,
            value_matrices=value_matrices,
            o=Projection.load(
                checkpoint, layer, {"o": (hidden, heads * latent.v_dim)}, backend, has_bias=config.o_bias
            ),
            indexer=Indexer.load(checkpoint, layer, table, half_order(latent), backend) if has_indexer else None,
            selection=None if latent.indexer is None else Selection(min(latent.indexer.top_k, config.context_length)),
            rotary_table=table,
            softmax_scale=config.softmax_scale or (latent.nope_dim + latent.rope_dim) ** -0.5,
            stored=Buffer("latent", (stored_dim,)),
            absorbed=Buffer("latent_absorbed", (heads, latent.kv_rank)),
            attended=Buffer("latent_attended", (heads, latent.kv_rank)),
            values=Buffer("latent_values", (heads, latent.v_dim)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        own = (*self.queries.buffers, self.stored, self.absorbed, self.attended, self.values)
        selected = () if self.selection is None else (self.selection.buffer,)
        return own + selected + (() if self.indexer is None else self.indexer.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        heads = self.key_matrices.nbytes + self.value_matrices.nbytes
        indexer = 0 if self.indexer is None else self.indexer.nbytes
        return self.queries.nbytes + self.kv_down.nbytes + heads + self.o.nbytes + indexer

    def __call__(self, x: torch.Tensor, out: torch.Tensor, step: StepInput, pool: KvPool, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]; the rows' latent vectors, and the indexer's keys, are written first."""
        backend, sizes, split = self.backend, self.sizes, self.num_heads * self.sizes.nope_dim
        small = self.queries(x, work, backend)
        wide, stored = work[self.queries.wide], self.kv_down(x, work[self.stored])
        plain = wide[:, :split].view(len(wide), self.num_heads, sizes.nope_dim)
        turned = wide[:, split:].view(len(wide), self.num_heads, sizes.rope_dim)
        latent, position = stored[:, None, : sizes.kv_rank], stored[:, None, sizes.kv_rank :]
        head_norm(latent, self.kv_norm, _NORM_EPS, backend=backend)
        for part in (turned, position):
            rotary(part, step.positions, self.rotary_table, backend=backend)
        index_keys = None if self.indexer is None else self.indexer.keys(x, step, work)
        kv_write(stored[:, None], index_keys, step.slots, pool, self.layer, backend=backend)
        selected = None if self.selection is None else work[self.selection.buffer]
        if self.indexer is not None and selected is not None:
            self.indexer.choose(x, small, selected, step, pool, work)
        absorbed = head_matmul(plain, self.key_matrices, work[self.absorbed], backend=backend)
        attended = mla_attention(
            absorbed, turned, pool, self.layer, step.rows, softmax_scale=self.softmax_scale, selected=selected,
            seal_check=step.seal_check, out=work[self.attended], backend=backend,
        )  # fmt: skip
        values = head_matmul(attended, self.value_matrices, work[self.values], backend=backend)
        self.o(values.flatten(1), out)


def half_order(latent: LatentConfig) -> torch.Tensor:
    """Where to find each rotated row: pair (2i, 2i + 1) of a file with neighbouring pairs is (i, i + rope_dim / 2) here."""
    rows = torch.arange(latent.rope_dim)
    return torch.cat([rows[0::2], rows[1::2]]) if latent.is_interleaved else rows


def _query_order(num_heads: int, latent: LatentConfig) -> torch.Tensor:
    """Rows of all heads' parts without a position, then those of their rotated parts."""
    first = torch.arange(num_heads)[:, None] * (latent.nope_dim + latent.rope_dim)
    plain, turned = first + torch.arange(latent.nope_dim), first + latent.nope_dim + half_order(latent)
    return torch.cat([plain.flatten(), turned.flatten()])


def _latent(checkpoint: Checkpoint) -> LatentConfig:
    assert checkpoint.config.latent is not None
    return checkpoint.config.latent


def _ordered(
    checkpoint: Checkpoint, layer: int, role: str, shape: tuple[int, int], order: torch.Tensor, backend: Backend, *,
    has_bias: bool = False,
) -> Projection:  # fmt: skip
    """A matrix with its rows, and its bias, in another order."""
    rows = permuted(checkpoint.matrix(role, layer, shape), order)
    bias = checkpoint.vector(f"{role}_bias", layer, shape[0])[order].to(device_of(backend)) if has_bias else None
    source = f"{checkpoint.label}: {checkpoint.tensor_name(role, layer)}"
    return Projection((placed([rows], source, backend, checkpoint.memory),), bias, backend)


def _split_kv_up(checkpoint: Checkpoint, layer: int, backend: Backend) -> tuple[HeadWeights, HeadWeights]:
    """The key and value matrices of each head. Quantized ones become float32: groups of columns don't survive being transposed."""
    config, latent = checkpoint.config, _latent(checkpoint)
    rows = checkpoint.matrix("kv_up", layer, (config.num_heads * (latent.nope_dim + latent.v_dim), latent.kv_rank))
    source = f"{checkpoint.label}: {checkpoint.tensor_name('kv_up', layer)}"
    matrix = rows if isinstance(rows, torch.Tensor) else packed(rows, source).dequantize()
    heads = matrix.view(config.num_heads, latent.nope_dim + latent.v_dim, latent.kv_rank)
    keys, values = heads[:, : latent.nope_dim].transpose(1, 2), heads[:, latent.nope_dim :]
    return HeadWeights.from_matrices(keys, backend), HeadWeights.from_matrices(values, backend)
