"""Steps computed by a model: a forward pass over the paged KV cache, then a sampler for each row that is due."""

from collections.abc import Sequence as ListLike

import torch

from kernels.kv_pool import KvPool
from worker.batch import Batch, build_batch
from worker.cache.page_pool import PageId
from worker.executor import ChunkResult, StepBatch, prompt_logit_positions
from worker.model.llama import LlamaModel
from worker.sampling import prompt_logprobs, sample
from worker.scheduler import Chunk


class ModelExecutor:
    """A model and its KV pool."""

    def __init__(self, model: LlamaModel, kv: KvPool) -> None:
        self.model = model
        self.kv = kv

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""
        return self.kv.layout.num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv.layout.page_size

    def build(self, chunks: ListLike[Chunk]) -> Batch:
        """The tensors of one forward pass."""
        return build_batch(chunks, self.page_size)

    def run(self, batch: StepBatch) -> list[ChunkResult]:
        """Forward, then sample all due rows."""
        assert isinstance(batch, Batch)
        logits = self.model.forward(batch.step, self.kv)
        prompt_part, sample_part = _split_rows(batch)
        due = [chunk.sequence.sampler for chunk in batch.chunks if chunk.is_last]
        sampled = iter(sample(logits[sample_part], due))
        return [
            ChunkResult(_prompt_part(chunk, logits[rows]) if rows else (), next(sampled) if chunk.is_last else None)
            for chunk, rows in zip(batch.chunks, prompt_part, strict=True)
        ]

    def scrub(self, page: PageId) -> None:
        """Zero a page in all layers."""
        self.kv.scrub(page)


def _prompt_part(chunk: Chunk, logits: torch.Tensor) -> ListLike[tuple[float, tuple[tuple[int, float], ...]]]:
    num_top = chunk.sequence.request.job.prompt_logprobs
    assert num_top is not None
    following = [chunk.sequence.tokens[position + 1] for position in prompt_logit_positions(chunk)]
    return prompt_logprobs(logits, following, num_top)


def _split_rows(batch: Batch) -> tuple[list[list[int]], list[int]]:
    """Logit row numbers: per chunk those of its prompt logprobs, and over all chunks those that are sampled."""
    prompt_part: list[list[int]] = []
    sample_part: list[int] = []
    row = 0
    for chunk, count in zip(batch.chunks, batch.prompt_rows, strict=True):
        prompt_part.append(list(range(row, row + count)))
        row += count
        if chunk.is_last:
            sample_part.append(row)
            row += 1
    return prompt_part, sample_part
