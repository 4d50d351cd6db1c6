"""What the engine asks of a model, whatever its architecture."""

from typing import Protocol

import torch

from kernels.kv_pool import KvDtype, KvLayout, KvPool
from worker.model.config import ModelConfig
from worker.model.step import StepInput


class Model(Protocol):
    """Weights and a forward pass over paged memory."""

    config: ModelConfig

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices; what is shared counts once."""
        ...

    def kv_layout(self, num_pages: int, page_size: int, dtype: KvDtype) -> KvLayout:
        """The layout of a pool for this model."""
        ...

    def forward(self, step: StepInput, pool: KvPool) -> torch.Tensor:
        """Logits float32 [num_logits, vocab] of the wanted rows; what later rows need of these is in the pool afterwards.

        The step lies on the CPU, and so do they. Not thread-safe: passes share their memory.
        """
        ...

    def prepare(self, pool: KvPool, max_sequences: int, step_tokens: int, *, checks_reads: bool = False) -> None:
        """Do now what would hold up the first passes over a pool: on a GPU kernels are compiled and passes recorded, on a CPU nothing is.

        `step_tokens` is the most rows of a pass; with `checks_reads` passes verify what they read. Raises torch.OutOfMemoryError if the largest one doesn't fit.
        """
        ...
