"""A request as the engine knows it, and its samples, the sequences.

waiting --admit--> running --commit of its last token--> finished
   ^                  |
   \\----preempt------/        (pages dropped, tokens and sampling state kept; its KV is computed again later)
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from protocol.ids import TenantId
from protocol.job import Job
from protocol.replies import FinishReason, TokenLogprob
from protocol.routing import Trail
from worker.cache.namespace import Namespace
from worker.cache.page_table import PageTable
from worker.cache.prefix_index import Node
from worker.sampling import SamplerRow
from worker.text import TextStream


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Request:
    """A job in this worker."""

    job: Job
    namespace: Namespace
    sequences: list["Sequence"] = field(default_factory=list)
    num_replies: int = 0
    cached_tokens: int = 0
    violations: int = 0
    violated_in_step: int = -1
    prompt_entries: list[TokenLogprob | None] = field(default_factory=list)
    is_prompt_reported: bool = False
    has_told_cached: bool = False

    def first_cached_tokens(self) -> int | None:
        """For the first delta of a request: an attempt that takes over couldn't know. None for those that follow."""
        if self.has_told_cached or self.job.progress is not None:
            return None
        self.has_told_cached = True
        return self.cached_tokens

    @property
    def may_share(self) -> bool:
        """Whether it may read and write the prefix index: logits of a cached prompt can't be reported, so not with prompt_logprobs."""
        return self.job.prompt_logprobs is None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated over all samples so far."""
        return sum(sequence.num_output for sequence in self.sequences)

    @property
    def is_finished(self) -> bool:
        """Whether all samples are complete."""
        return all(sequence.state is State.FINISHED for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request.

    `tokens` are prompt and output. KV of tokens [0, num_computed) lies in the pages of `table`; the engine's one rule is that
    tokens[num_computed:] are still to be computed, whether it is the whole prompt, a chunk's rest, all of it after a preemption, or
    the one token of a decode step. `digests` name the prefixes of whole pages known so far; the first `num_published` pages were
    offered to the prefix index or came from it; `known` is the index' node of the last of them, if it is there. `repeated` are tokens that
    the client has, which are computed again for what else must be known of them. `trail` gives the digests by which other jobs find its pages in this worker.
    """

    request: Request
    index: int
    tokens: list[int]
    sampler: SamplerRow
    text: TextStream
    state: State = State.WAITING
    num_computed: int = 0
    table: PageTable = field(default_factory=PageTable)
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    known: Node | None = None
    finish_reason: FinishReason | None = None
    repeated: deque[int] = field(default_factory=deque)
    admitted_at: int = 0
    blocked_below: int = 0
    trail: Trail | None = None

    @property
    def tenant(self) -> TenantId:
        """Whose sequence it is."""
        return self.request.job.tenant

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.job.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed; the last of them gives the next token's logits."""
        return len(self.tokens) - self.num_computed

    def digest(self, place: int, page_size: int) -> bytes:
        """The digest of the prefix that ends with page `place`, all of whose tokens must be known; -1 stands for the empty prefix."""
        namespace = self.request.namespace
        while len(self.digests) <= place:
            depth = len(self.digests)
            parent = self.digests[-1] if depth else namespace.root
            self.digests.append(namespace.chain(parent, self.tokens[depth * page_size : (depth + 1) * page_size]))
        return self.digests[place] if place >= 0 else namespace.root

    def landmarks(self, start: int, end: int) -> list[bytes]:
        """The digests of the landmarks in (start, end] tokens, all of which must be known."""
        return [] if self.trail is None else self.trail.between(self.tokens, start, end)

    def may_start(self) -> bool:
        """Samples after the first wait until the first has published the prompt's pages, so that the prompt is computed once."""
        if self.index == 0 or self.num_output or not self.request.may_share:
            return True
        first = self.request.sequences[0]
        return first.state is State.FINISHED or first.num_output > 0
