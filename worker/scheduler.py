"""Decides what the next step computes: continuous batching with chunked prefill under a token budget. No torch.

Order of claims on a step: running decodes (one token each), then prompts being prefilled, in equal shares, then new
admissions. A sequence that needs a page when none is left makes the most recently admitted one give its pages back; the
earliest admitted is never the victim while another runs, so somebody always gets to the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from worker.cache.page_cache import Lease, PageCache
from worker.fairness import FairQueue
from worker.sequence import Sequence, State

MIN_CHUNK_TOKENS = 16

# How many of the pages that were found for a sequence's prefix are sound, given their leases and digests.
Inspect = Callable[[Sequence, list[Lease], list[bytes]], int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the step brings the sequence up to date, so that its next token can be sampled."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """Waiting and running sequences, and the pages they need."""

    def __init__(self, cache: PageCache, max_sequences: int, step_tokens: int) -> None:
        self.cache = cache
        self.queue = FairQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.inspect: Inspect | None = None
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._num_admitted = 0

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        self.queue.push(sequence)

    def plan(self) -> list[Chunk]:
        """The next step's chunks; empty if there is nothing to do. Pages for them are allocated."""
        self._admit()
        decodes = [s for s in self.running if s.num_remaining == 1]
        prefills = [s for s in self.running if s.num_remaining > 1]
        wanted = {id(s): 1 for s in decodes}
        wanted.update(self._shares(prefills, self._step_tokens - len(decodes)))
        chunks = [self._chunk(s, wanted[id(s)]) for s in list(self.running) if wanted.get(id(s))]
        # A later chunk's need for pages may have preempted a sequence with an earlier chunk.
        return [c for c in chunks if c is not None and c.sequence.state is State.RUNNING]

    def commit(self, chunk: Chunk) -> None:
        """The chunk's KV is in the pages."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.start + chunk.count
        decoded = int(chunk.start >= sequence.num_prompt)
        self.queue.charge(sequence.tenant, chunk.count - decoded, decoded)

    def publish(self, sequence: Sequence) -> None:
        """Make the sequence's whole pages findable. Call only after its logits were seen to be sound."""
        if not sequence.request.may_share:
            return
        size = self.cache.page_size
        while (sequence.num_published + 1) * size <= sequence.num_computed:
            depth = sequence.num_published
            tokens = sequence.tokens[depth * size : (depth + 1) * size]
            parent, digest = sequence.digest(depth - 1, size), sequence.digest(depth, size)
            landmarks = sequence.landmarks(depth * size, (depth + 1) * size)
            if depth == 0 or self.cache.index.holds(sequence.known):
                self.cache.publish(parent, digest, sequence.table.leases[depth], tokens, depth, landmarks)
                sequence.known = self.cache.index.get(digest, parent, tokens)
            sequence.num_published += 1

    def finish(self, sequence: Sequence) -> None:
        """A sequence ends, in whatever state it is: done, failed or cancelled. Harmless if it has ended before."""
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.WAITING:
            self.queue.remove(sequence)
        sequence.state = State.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it keeps its tokens and goes back to the head of its line."""
        self._stop(sequence)
        sequence.state = State.WAITING
        self.queue.push_front(sequence)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Admit from the least served tenant's line, in strict order: a large request isn't overtaken until it starves."""
        while len(self.running) < self._max_sequences:
            candidates = self.queue.candidates()
            if not candidates or not self._try_admit(candidates[0]):
                return

    def _try_admit(self, sequence: Sequence) -> bool:
        """Admit if the rest of its tokens and one page for each running sequence can be had, or a preemption would follow soon."""
        if self.running and self.cache.num_available() < sequence.blocked_below:
            return False
        leases, digests = self._match(sequence)
        num_pages = len(sequence.tokens) // self.cache.page_size + 1
        num_needed = min(num_pages + len(self.running), self.cache.pool.num_pages) - len(leases)
        if self.running and self.cache.num_available() < num_needed:
            # Another match is worth its hashing only when pages have come back.
            sequence.blocked_below = self.cache.num_available() + 1
            self.cache.release(reversed(leases))
            return False
        self.queue.started(sequence.tenant)
        self.queue.remove(sequence)
        self._num_admitted += 1
        if sequence.index == 0 and not sequence.admitted_at and sequence.request.job.progress is None:
            sequence.request.cached_tokens = len(leases) * self.cache.page_size
        sequence.admitted_at = self._num_admitted
        sequence.blocked_below = 0
        namespace = sequence.request.namespace
        keys = (namespace.page_key(d, lease.tag, is_whole=True) for d, lease in zip(digests, leases, strict=True))
        sequence.table.adopt(leases, keys)
        sequence.digests = digests
        sequence.num_published = len(leases)
        sequence.known = self.cache.index.at(leases[-1].page) if leases else None
        sequence.num_computed = len(leases) * self.cache.page_size
        sequence.state = State.RUNNING
        self.running.append(sequence)
        return True

    def _match(self, sequence: Sequence) -> tuple[list[Lease], list[bytes]]:
        if not sequence.request.may_share:
            return [], []
        leases, digests = self.cache.match(sequence.request.namespace, sequence.tokens)
        num_sound = len(leases) if self.inspect is None else self.inspect(sequence, leases, digests)
        if num_sound < len(leases):
            self.cache.release(reversed(leases[num_sound:]))
        return leases[:num_sound], digests[:num_sound]

    def _shares(self, prefills: list[Sequence], budget: int) -> dict[int, int]:
        """Split the budget equally, what the short ones don't need going to the longer ones."""
        shares: dict[int, int] = {}
        by_length = sorted(prefills, key=lambda s: (s.num_remaining, s.admitted_at))
        for position, sequence in enumerate(by_length):
            fair = max(budget // (len(by_length) - position), min(MIN_CHUNK_TOKENS, budget))
            shares[id(sequence)] = min(fair, sequence.num_remaining)
            budget -= shares[id(sequence)]
        return shares

    def _chunk(self, sequence: Sequence, count: int) -> Chunk | None:
        """Reserve pages for `count` tokens more, preempting others or the sequence itself if there are none."""
        if sequence.state is not State.RUNNING:
            return None
        size = self.cache.page_size
        missing = -(-(sequence.num_computed + count) // size) - len(sequence.table)
        while missing > 0:
            leases = self.cache.allocate(sequence.request.namespace, missing)
            if leases is not None:
                sequence.table.extend(leases)
                break
            victim = max(self.running, key=lambda s: s.admitted_at)
            if victim is sequence and len(self.running) == 1:
                return None  # alone and still no page: the rest is in quarantine; try again after the next scrub
            self.preempt(victim)
            if victim is sequence:
                return None
        return Chunk(sequence, sequence.num_computed, count)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.queue.stopped(sequence.tenant)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        # The deepest page first: prefixes are evicted from their ends.
        self.cache.release(reversed(sequence.table.clear()))
        sequence.digests = []
        sequence.known = None
        sequence.num_computed = sequence.num_published = 0

    def check_invariants(self) -> None:
        """Running sequences hold the pages that they need, nobody else any."""
        self.cache.check_invariants()
        held = {lease.page for sequence in self.running for lease in sequence.table.leases}
        assert len(held) == self.cache.pool.num_held
        assert len(self.running) <= self._max_sequences
        for sequence in self.running:
            assert sequence.state is State.RUNNING
            assert sequence.num_computed <= len(sequence.table) * self.cache.page_size
            assert sequence.num_computed < len(sequence.tokens)
