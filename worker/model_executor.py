"""Steps computed by a model: a forward pass over the paged KV cache, then a sampler for each row that is due."""

from collections.abc import Sequence as ListLike
from dataclasses import replace

import structlog
import torch

from kernels.backend import Backend
from kernels.kv_pool import KvPool
from worker.batch import Batch, build_batch
from worker.cache.page_pool import PageId, PagePool
from worker.device_errors import device_work
from worker.executor import BadPage, ChunkResult, StepBatch, prompt_logit_positions
from worker.model.model import Model
from worker.model.step import StepInput
from worker.sampling import prompt_logprobs, sample
from worker.scheduler import Chunk
from worker.seal_keeper import SealKeeper
from worker.sealing import plan_seals

_log = structlog.get_logger(__name__)


class ModelExecutor:
    """A model and its KV pool. If the pool has seals they are kept; with `checks_reads` each pass verifies every page that it reads.

    Whatever it asks of a GPU raises DeviceLostError where that has failed.
    """

    def __init__(self, model: Model, kv: KvPool, backend: Backend, *, checks_reads: bool = False) -> None:
        self.model = model
        self.kv = kv
        self._backend = backend
        self._checks_reads = checks_reads
        self._keeper = SealKeeper(kv, backend) if kv.seals is not None else None

    @property
    def has_seals(self) -> bool:
        """Whether the pool has seals."""
        return self._keeper is not None

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
        return build_batch(chunks, self.page_size, self._backend)

    @device_work()
    def prepare(self, max_sequences: int, step_tokens: int) -> None:
        """Do now what would hold up the first steps (see `Model.prepare`), and the first look at seals. Changes no page."""
        self.model.prepare(self.kv, max_sequences, step_tokens, checks_reads=self._checks_reads)
        if self._keeper is not None:
            self._keeper.prepare()

    @device_work()
    def run(self, batch: StepBatch, pool: PagePool) -> list[ChunkResult]:
        """Seal what the step writes to, forward, then sample all due rows of sequences whose pages were found sound."""
        assert isinstance(batch, Batch)
        step = batch.step
        if self._keeper is not None:
            self._keeper.carry_out(plan_seals(batch.chunks, pool, self.page_size))
            if self._checks_reads:
                step = replace(step, seal_check=self._keeper.check_for(batch.chunks, step.page_table))
        logits = self.model.forward(step, self.kv)
        return _results(batch, logits, _violations(step, len(batch.chunks)))

    @device_work()
    def verify(self, pages: ListLike[PageId], keys: ListLike[int]) -> list[int]:
        """See `Executor.verify`."""
        assert self._keeper is not None
        return self._keeper.verify(pages, keys)

    @device_work()
    def mend(self) -> None:
        """Bring back the scales if they have changed."""
        if self._keeper is not None and self._keeper.mend_scales():
            _log.error("kv_scales_mended")

    @device_work()
    def scrub(self, page: PageId) -> None:
        """Zero a page in all layers."""
        self.kv.scrub(page)


def _violations(step: StepInput, num_chunks: int) -> list[BadPage | None]:
    if step.seal_check is None or not step.seal_check.violations.numpy().any():
        return [None] * num_chunks
    found = [step.seal_check.violation(row) for row in range(num_chunks)]
    return [None if bad is None else BadPage(place=bad[1], layer=bad[0]) for bad in found]


def _results(batch: Batch, logits: torch.Tensor, violations: list[BadPage | None]) -> list[ChunkResult]:
    prompt_part, sample_part = _split_rows(batch)
    ends = [i for i, chunk in enumerate(batch.chunks) if chunk.is_last]
    due = [(row, i) for row, i in zip(sample_part, ends, strict=True) if violations[i] is None]
    due_rows = [row for row, _ in due]
    wanted = logits if due_rows == list(range(len(logits))) else logits[due_rows]
    sampled = sample(wanted, [batch.chunks[i].sequence.sampler for _, i in due])
    by_chunk = {i: result for (_, i), result in zip(due, sampled, strict=True)}
    return [
        ChunkResult(violation=bad)
        if bad is not None
        else ChunkResult(_prompt_part(chunk, logits[rows]) if rows else (), by_chunk.get(i))
        for i, (chunk, rows, bad) in enumerate(zip(batch.chunks, prompt_part, violations, strict=True))
    ]


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
