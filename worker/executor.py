"""What the engine asks of whatever computes its steps: a model, or something that only plays one. No torch.

The engine decides what a step computes and what becomes of its results; the executor alone knows tensors and stored bytes.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Protocol

from worker.cache.page_pool import PageId, PagePool
from worker.sampling import NotFinite, Sampled
from worker.sampling.logprobs import Top
from worker.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page of a sequence, by its place in the table, and the first layer whose seal is wrong."""

    place: int
    layer: int


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What one chunk's rows gave.

    With a `violation` the chunk read a page whose seal was wrong, and there is nothing else. `prompt` has a (logprob, alternatives) pair for each of `prompt_logit_positions`, `sampled` the next token if the chunk is the
    sequence's last.
    """

    prompt: ListLike[tuple[float, Top]] = field(default=())
    sampled: Sampled | NotFinite | None = None
    violation: BadPage | None = None


class StepBatch(Protocol):
    """Chunks laid out for one step."""

    @property
    def chunks(self) -> ListLike[Chunk]:
        """What is computed."""
        ...

    def stale_chunks(self, pool: PagePool) -> list[Chunk]:
        """Chunks whose table leads to a page of another life or owner."""
        ...


class Executor(Protocol):
    """Computes steps. Its pages are numbered from 0; not thread-safe. What it does to pages raises DeviceLostError if their device has failed."""

    @property
    def num_pages(self) -> int:
        """Pages that it can store."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        ...

    def build(self, chunks: ListLike[Chunk]) -> StepBatch:
        """Lay chunks out."""
        ...

    def run(self, batch: StepBatch, pool: PagePool) -> list[ChunkResult]:
        """Compute and sample; one result for each chunk, in their order. Whatever it raises but DeviceLostError is the batch's error."""
        ...

    def scrub(self, page: PageId) -> None:
        """Overwrite what is stored in a page."""
        ...

    @property
    def has_seals(self) -> bool:
        """Whether it seals pages."""
        ...

    def verify(self, pages: ListLike[PageId], keys: ListLike[int]) -> list[int]:
        """The first layer of each whole page whose bytes aren't sealed with its key, or -1. Only if it has seals."""
        ...

    def mend(self) -> None:
        """After a violation: set right what isn't any page's, such as scales."""
        ...


def prompt_logit_positions(chunk: Chunk) -> range:
    """Positions of the chunk whose logits give a prompt token's logprob that's asked for and not known yet."""
    sequence = chunk.sequence
    request = sequence.request
    if request.job.prompt_logprobs is None or sequence.index > 0:
        return range(0)
    # Entry i of the prompt comes from the logits at position i - 1; entry 0 is None.
    first = max(chunk.start, len(request.prompt_entries) - 1)
    return range(first, max(first, min(chunk.start + chunk.count, sequence.num_prompt - 1)))
