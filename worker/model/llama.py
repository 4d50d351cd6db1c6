"""The llama architecture: rotary grouped-query attention and SwiGLU between RMS norms (Touvron et al., 2023).

One forward pass serves prompts and decode steps alike: it takes rows of tokens, writes their keys and values into pages, and attends
through the page table.
"""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.embedding import embedding
from kernels.kv_pool import AttentionRows, KvPool
from kernels.kv_write import kv_write
from kernels.matmul import matmul
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.silu_mul import silu_mul
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.rope import inverse_frequencies
from worker.model.step import StepInput
from worker.model.tensors import can_stack, packed, stacked


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that share their input; they're one matrix where their formats allow it."""

    parts: tuple[Weight, ...]

    def __call__(self, x: torch.Tensor, backend: Backend) -> torch.Tensor:
        """x float32 [T, in] -> float32 [T, sum of outs]."""
        outs = [matmul(x, part, backend=backend) for part in self.parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    attn_norm: torch.Tensor
    qkv: Projection
    o: Projection
    ffn_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class LlamaModel:
    """Weights and the forward pass."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend) -> None:
        config = checkpoint.config
        self.config = config
        self._backend = backend
        hidden = config.hidden_size
        self._embedding = _weight(checkpoint, "embedding", (config.vocab_size, hidden))
        self._layers = [_layer(checkpoint, index) for index in range(config.num_layers)]
        self._final_norm = checkpoint.vector("final_norm", None, hidden)
        self._head = (
            self._embedding if config.tie_embeddings else _weight(checkpoint, "head", (config.vocab_size, hidden))
        )
        frequencies = inverse_frequencies(config, checkpoint.rope_factors())
        self._rotary_table = rotary_table(frequencies, config.context_length)
        self._softmax_scale = config.head_dim**-0.5

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices; a tied head counts once."""
        weights = [self._embedding] + ([] if self.config.tie_embeddings else [self._head])
        for layer in self._layers:
            for projection in (layer.qkv, layer.o, layer.gate_up, layer.down):
                weights.extend(projection.parts)
        return sum(weight.nbytes for weight in weights)

    def forward(self, step: StepInput, pool: KvPool) -> torch.Tensor:
        """Logits float32 [num_logits, vocab] of the wanted rows; keys and values of all rows are in the pool afterwards."""
        backend, eps = self._backend, self.config.rms_eps
        rows = AttentionRows(step.page_table, step.row_sequence, step.positions)
        rows.check("forward", pool.layout)
        residual = embedding(step.token_ids, self._embedding)
        x = rms_norm(residual, self._layers[0].attn_norm, eps, backend=backend)
        for index, layer in enumerate(self._layers):
            attended = self._attend(x, layer, index, step, rows, pool)
            x = rms_norm(layer.o(attended, backend), layer.ffn_norm, eps, residual=residual, backend=backend)
            ffn = layer.down(silu_mul(layer.gate_up(x, backend), backend=backend), backend)
            if index + 1 < len(self._layers):
                following = self._layers[index + 1].attn_norm
                x = rms_norm(ffn, following, eps, residual=residual, backend=backend)
        wanted = step.logit_rows
        x = rms_norm(ffn[wanted], self._final_norm, eps, residual=residual[wanted], backend=backend)
        return matmul(x, self._head, backend=backend)

    def _attend(
        self, x: torch.Tensor, layer: Layer, index: int, step: StepInput, rows: AttentionRows, pool: KvPool
    ) -> torch.Tensor:
        config, backend, num_rows = self.config, self._backend, x.shape[0]
        split = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
        q, k, v = (
            part.contiguous().view(num_rows, -1, config.head_dim)
            for part in torch.split(layer.qkv(x, backend), split, dim=1)
        )
        rotary(q, step.positions, self._rotary_table, backend=backend)
        rotary(k, step.positions, self._rotary_table, backend=backend)
        kv_write(k, v, step.slots, pool, index, backend=backend)
        attended = paged_attention(q, pool, index, rows, softmax_scale=self._softmax_scale, backend=backend)
        return attended.view(num_rows, -1)


def _weight(checkpoint: Checkpoint, role: str, shape: tuple[int, int]) -> Weight:
    rows = checkpoint.matrix(role, None, shape)
    return packed(rows, f"{checkpoint.label}: {checkpoint.tensor_name(role, None)}")


def _projection(checkpoint: Checkpoint, layer: int, shapes: dict[str, tuple[int, int]]) -> Projection:
    parts = [checkpoint.matrix(role, layer, shape) for role, shape in shapes.items()]
    sources = [f"{checkpoint.label}: {checkpoint.tensor_name(role, layer)}" for role in shapes]
    if can_stack(parts):
        return Projection((packed(stacked(parts), sources[0]),))
    return Projection(tuple(packed(part, source) for part, source in zip(parts, sources, strict=True)))


def _layer(checkpoint: Checkpoint, index: int) -> Layer:
    config = checkpoint.config
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return Layer(
        attn_norm=checkpoint.vector("attn_norm", index, hidden),
        qkv=_projection(checkpoint, index, {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden)}),
        o=_projection(checkpoint, index, {"o": (hidden, q_size)}),
        ffn_norm=checkpoint.vector("ffn_norm", index, hidden),
        gate_up=_projection(checkpoint, index, {"gate": (ffn, hidden), "up": (ffn, hidden)}),
        down=_projection(checkpoint, index, {"down": (hidden, ffn)}),
    )
