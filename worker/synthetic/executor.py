"""Steps that compute nothing but take the time that a model would: prompt tokens share a rate, each stream has one of its own."""

import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from worker.cache.page_pool import PageId, PagePool
from worker.executor import ChunkResult, StepBatch, prompt_logit_positions
from worker.sampling import NotFinite, Sampled, sample_row
from worker.sampling.logprobs import Top, row_logprobs
from worker.scheduler import Chunk
from worker.sequence import Sequence
from worker.settings import SyntheticSettings
from worker.synthetic.script import Script, is_plain

# Steps that follow each other within this time keep to one timetable, so that what the scheduler takes doesn't lower the rate.
_SAME_TIMETABLE_S = 0.005


@dataclass(frozen=True, slots=True)
class SyntheticBatch:
    """One step's chunks. There are no stored bytes, so no table can lead to wrong ones."""

    chunks: ListLike[Chunk]

    def stale_chunks(self, pool: PagePool) -> list[Chunk]:  # noqa: ARG002 - the engine's signature
        """None."""
        return []


class SyntheticExecutor:
    """Plays a model."""

    def __init__(self, settings: SyntheticSettings, num_pages: int, page_size: int) -> None:
        self._settings = settings
        self._num_pages = num_pages
        self._page_size = page_size
        self._script = Script()
        self._due_s = 0.0

    @property
    def num_pages(self) -> int:
        """Pages that are counted; none of them is stored."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._page_size

    def build(self, chunks: ListLike[Chunk]) -> SyntheticBatch:
        """Nothing to lay out."""
        return SyntheticBatch(chunks)

    def run(self, batch: StepBatch, pool: PagePool) -> list[ChunkResult]:  # noqa: ARG002 - the engine's signature
        """Choose all due tokens, then wait until the step's time is over."""
        started_s = time.monotonic()
        results = [self._result(chunk) for chunk in batch.chunks]
        self._wait(started_s, self._duration_s(batch.chunks))
        return results

    def scrub(self, page: PageId) -> None:
        """Nothing to overwrite."""

    @property
    def has_seals(self) -> bool:
        """There is nothing to seal."""
        return False

    def verify(self, pages: ListLike[PageId], keys: ListLike[int]) -> list[int]:  # noqa: ARG002 - the engine's signature
        """Nothing is stored, so nothing is wrong."""
        return [-1] * len(pages)

    def mend(self) -> None:
        """Nothing to set right."""

    def _result(self, chunk: Chunk) -> ChunkResult:
        return ChunkResult(
            [self._prompt_entry(chunk.sequence, position) for position in prompt_logit_positions(chunk)],
            self._sampled(chunk.sequence) if chunk.is_last else None,
        )

    def _sampled(self, sequence: Sequence) -> Sampled | NotFinite:
        position = sequence.num_output
        if is_plain(sequence.sampler):
            return Sampled(self._script.favourite(sequence, position))
        return sample_row(self._script.logits(sequence, position), sequence.sampler)

    def _prompt_entry(self, sequence: Sequence, position: int) -> tuple[float, Top]:
        """Of the prompt token after `position`."""
        num_top = sequence.request.job.prompt_logprobs or 0
        return row_logprobs(self._script.logits(sequence, -1 - position), sequence.tokens[position + 1], num_top)

    def _duration_s(self, chunks: ListLike[Chunk]) -> float:
        num_prompt = sum(chunk.count for chunk in chunks if not _is_decode(chunk))
        prefill, decode = self._settings.prefill_rate, self._settings.decode_rate
        duration_s = num_prompt / prefill if prefill else 0.0
        return duration_s + (1.0 / decode if decode and any(map(_is_decode, chunks)) else 0.0)

    def _wait(self, started_s: float, duration_s: float) -> None:
        is_late = started_s - self._due_s > _SAME_TIMETABLE_S
        self._due_s = (started_s if is_late else self._due_s) + duration_s
        # Even a step of no time lets other threads have their turn.
        time.sleep(max(self._due_s - time.monotonic(), 0.0))


def _is_decode(chunk: Chunk) -> bool:
    return chunk.count == 1 and chunk.start >= chunk.sequence.num_prompt
