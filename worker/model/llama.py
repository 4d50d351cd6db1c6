"""The llama architecture: rotary grouped-query attention and SwiGLU between RMS norms (Touvron et al., 2023).

One forward pass serves prompts and decode steps alike: it takes rows of tokens, writes their keys and values into pages, and attends
through the page table. It consists of ops alone, so that it can be recorded.
"""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.embedding import embedding
from kernels.kv_pool import KvPool
from kernels.kv_write import kv_write
from kernels.matmul import matmul
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.silu_mul import silu_mul
from kernels.take_rows import take_rows
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.recorded_steps import RecordedSteps
from worker.model.rope import inverse_frequencies
from worker.model.step import StepInput, Workspace
from worker.model.tensors import can_stack, packed, stacked


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that share their input; they're one matrix where their formats allow it."""

    parts: tuple[Weight, ...]

    def __call__(self, x: torch.Tensor, out: torch.Tensor, backend: Backend) -> torch.Tensor:
        """x float32 [T, in] -> out float32 [T, sum of outs]."""
        first = 0
        for part in self.parts:
            matmul(x, part, out[:, first : first + part.shape[0]], backend=backend)
            first += part.shape[0]
        return out


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
        self._recorded: RecordedSteps | None = None
        self._workspace = Workspace.allocate(config, 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices; a tied head counts once."""
        weights = [self._embedding] + ([] if self.config.tie_embeddings else [self._head])
        for layer in self._layers:
            for projection in (layer.qkv, layer.o, layer.gate_up, layer.down):
                weights.extend(projection.parts)
        return sum(weight.nbytes for weight in weights)

    def forward(self, step: StepInput, pool: KvPool) -> torch.Tensor:
        """Logits float32 [num_logits, vocab] of the wanted rows; keys and values of all rows are in the pool afterwards.

        Not thread-safe: passes share their memory.
        """
        step.check(pool.layout, self.config)
        if self._recorded is None or self._recorded.pool is not pool:
            self._recorded = RecordedSteps(self.config, pool, self._compute)
        if self._backend is Backend.CPU and self._recorded.takes(step):
            x = self._recorded.run(step)
        else:
            num_rows = len(step.token_ids)
            if self._workspace.num_rows < num_rows:
                self._workspace = Workspace.allocate(self.config, num_rows)
            x = self._compute(step, pool, self._workspace.first(num_rows))
        return matmul(x, self._head, backend=self._backend)

    def _compute(self, step: StepInput, pool: KvPool, work: Workspace) -> torch.Tensor:
        """The normalized last hidden states of the wanted rows, float32 [num_logits, hidden]."""
        backend, eps, residual, x = self._backend, self.config.rms_eps, work.residual, work.x
        embedding(step.token_ids, self._embedding, residual, backend=backend)
        rms_norm(residual, self._layers[0].attn_norm, eps, out=x, backend=backend)
        for index, layer in enumerate(self._layers):
            self._attend(layer, index, step, pool, work)
            rms_norm(work.projected, layer.ffn_norm, eps, residual=residual, out=x, backend=backend)
            layer.gate_up(x, work.gate_up, backend)
            layer.down(silu_mul(work.gate_up, work.ffn, backend=backend), work.projected, backend)
            is_last = index + 1 == len(self._layers)
            following = self._final_norm if is_last else self._layers[index + 1].attn_norm
            rms_norm(work.projected, following, eps, residual=residual, out=x, backend=backend)
        return take_rows(x, step.logit_rows, work.last[: len(step.logit_rows)], backend=backend)

    def _attend(self, layer: Layer, index: int, step: StepInput, pool: KvPool, work: Workspace) -> None:
        """From work.x to work.projected."""
        config, backend, num_rows = self.config, self._backend, work.num_rows
        layer.qkv(work.x, work.qkv.view(num_rows, -1), backend)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        q, k, v = torch.split(work.qkv, [heads, kv_heads, kv_heads], dim=1)
        rotary(work.qkv[:, : heads + kv_heads], step.positions, self._rotary_table, backend=backend)
        kv_write(k, v, step.slots, pool, index, backend=backend)
        paged_attention(
            q, pool, index, step.rows, softmax_scale=self._softmax_scale, seal_check=step.seal_check,
            out=work.attended, backend=backend,
        )  # fmt: skip
        layer.o(work.attended.view(num_rows, -1), work.projected, backend)


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
