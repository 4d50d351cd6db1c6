"""Layers of attention and feed-forward between RMS norms, from token ids to logits: what all architectures share.

One forward pass serves prompts and decode steps alike: it takes rows of tokens, writes what later rows need into pages, and attends
through the page table. It consists of ops alone, so that it can be recorded, and looks at no number, so that nobody waits for a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.backend import Backend, device_of
from kernels.embedding import embedding
from kernels.gpu_weights import GpuInt4Weight, GpuInt8Weight
from kernels.kv_pool import KvDtype, KvLayout, KvPool
from kernels.matmul import matmul
from kernels.rms_norm import rms_norm
from kernels.take_rows import take_rows
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.device_steps import USUAL_ROWS, DeviceSteps, Parts
from worker.model.errors import ModelError
from worker.model.latent_attention import latent_layout
from worker.model.projection import load_matrix, load_norm
from worker.model.recorded_steps import RecordedSteps
from worker.model.step import StepInput
from worker.model.workspace import Buffer, Workspace


class Part(Protocol):
    """Something with weights that computes in the workspace."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        ...


class Attention(Part, Protocol):
    """A layer's attention."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor, step: StepInput, pool: KvPool, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]; writes the rows' part of the pool first."""
        ...


class FeedForward(Part, Protocol):
    """A layer's feed-forward."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """residual += attention(norm(residual)), then residual += feed_forward(norm(residual)). Norms float32 [hidden].

    What a part adds may be normalized too, by its `post` norm.
    """

    attn_norm: torch.Tensor
    attention: Attention
    ffn_norm: torch.Tensor
    feed_forward: FeedForward
    post_attn_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None


def pool_layout(config: ModelConfig, num_pages: int, page_size: int, dtype: KvDtype) -> KvLayout:
    """The layout of a pool: keys and values of all layers, or latent vectors."""
    if config.latent is not None:
        return latent_layout(config, num_pages, page_size, dtype)
    return KvLayout(config.num_layers, num_pages, config.num_kv_heads, config.head_dim, page_size, dtype)


class Decoder:
    """A model of such layers. Its embedding and head are [vocab, hidden]."""

    def __init__(self, checkpoint: Checkpoint, load_layer: Callable[[int], Layer], backend: Backend) -> None:
        config = checkpoint.config
        hidden, matrix = config.hidden_size, (config.vocab_size, config.hidden_size)
        self.config = config
        self._backend = backend
        # The largest matrices come first: what their packing needs besides is freed before the others are there.
        self._embedding = load_matrix(checkpoint, "embedding", matrix, backend)
        if isinstance(self._embedding, GpuInt4Weight | GpuInt8Weight) and self._embedding.order is not None:
            name = checkpoint.tensor_name("embedding", None)
            raise ModelError(
                f"{checkpoint.label}: {name}: an embedding in another order of columns (act-order) is not supported on a GPU"
            )
        self._head = self._embedding if config.tie_embeddings else load_matrix(checkpoint, "head", matrix, backend)
        self._layers = tuple(load_layer(index) for index in range(config.num_layers))
        self._final_norm = load_norm(checkpoint, "final_norm", None, hidden, backend)
        self._residual, self._x = Buffer("residual", (hidden,)), Buffer("x", (hidden,))
        self._added, self._last = Buffer("added", (hidden,)), Buffer("last", (hidden,))
        self._recorded: RecordedSteps | None = None
        self._on_device: DeviceSteps | None = None
        self._workspace = self._allocate(0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices; a tied head counts once."""
        head_bytes = 0 if self.config.tie_embeddings else self._head.nbytes
        layers_bytes = sum(layer.attention.nbytes + layer.feed_forward.nbytes for layer in self._layers)
        return self._embedding.nbytes + head_bytes + layers_bytes

    def kv_layout(self, num_pages: int, page_size: int, dtype: KvDtype) -> KvLayout:
        """See `Model.kv_layout`."""
        return pool_layout(self.config, num_pages, page_size, dtype)

    def forward(self, step: StepInput, pool: KvPool) -> torch.Tensor:
        """See `Model.forward`."""
        step.check(pool.layout, self.config)
        if self._backend is Backend.GPU:
            if self._on_device is None or self._on_device.pool is not pool:
                self._on_device = self._new_device_steps(pool)
            return self._on_device.run(step)
        if self._recorded is None or self._recorded.pool is not pool:
            self._recorded = RecordedSteps(self.config.context_length, pool, self._compute, self._allocate)
        if self._backend is Backend.CPU and self._recorded.takes(step):
            x = self._recorded.run(step)
        else:
            num_rows = len(step.token_ids)
            if self._workspace.num_rows < num_rows:
                self._workspace = self._allocate(num_rows)
            x = self._compute(step, pool, self._workspace.first(num_rows))
        return self._logits(x)

    def prepare(self, pool: KvPool, max_sequences: int, step_tokens: int, *, checks_reads: bool = False) -> None:
        """See `Model.prepare`."""
        if self._backend is Backend.GPU:
            self._on_device = self._new_device_steps(pool, max_sequences)
            self._on_device.prepare(step_tokens, checks_reads=checks_reads)

    def _new_device_steps(self, pool: KvPool, max_rows: int = USUAL_ROWS) -> DeviceSteps:
        self._on_device = None  # its memory is free for the next one
        config = self.config
        parts = Parts(self._compute, self._logits, self._allocate, config.vocab_size, config.context_length)
        return DeviceSteps(parts, pool, device_of(self._backend), max_rows)

    def _logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(x, self._head, out, backend=self._backend)

    def _allocate(self, num_rows: int) -> Workspace:
        buffers = {self._residual, self._x, self._added, self._last}
        for layer in self._layers:
            buffers.update(layer.attention.buffers, layer.feed_forward.buffers)
        return Workspace.allocate(buffers, num_rows, device_of(self._backend))

    def _compute(self, step: StepInput, pool: KvPool, work: Workspace) -> torch.Tensor:
        """The normalized last hidden states of the wanted rows, float32 [num_logits, hidden]."""
        backend, eps = self._backend, self.config.rms_eps
        residual, x, added = work[self._residual], work[self._x], work[self._added]
        embedding(step.token_ids, self._embedding, residual, factor=self.config.embedding_factor, backend=backend)
        rms_norm(residual, self._layers[0].attn_norm, eps, out=x, backend=backend)
        for index, layer in enumerate(self._layers):
            layer.attention(x, added, step, pool, work)
            if layer.post_attn_norm is not None:
                rms_norm(added, layer.post_attn_norm, eps, out=added, backend=backend)
            rms_norm(added, layer.ffn_norm, eps, residual=residual, out=x, backend=backend)
            layer.feed_forward(x, added, work)
            if layer.post_ffn_norm is not None:
                rms_norm(added, layer.post_ffn_norm, eps, out=added, backend=backend)
            is_last = index + 1 == len(self._layers)
            following = self._final_norm if is_last else self._layers[index + 1].attn_norm
            rms_norm(added, following, eps, residual=residual, out=x, backend=backend)
        return take_rows(x, step.logit_rows, work[self._last][: len(step.logit_rows)], backend=backend)
