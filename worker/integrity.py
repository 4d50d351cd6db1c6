"""What the engine does about the integrity of the KV cache: looks at prefixes before their first use, walks the pool, and heals.

A violation is known before a token is sampled from the step that read the page. The page is quarantined, which drops the prefixes that go
on from it; sequences that hold it start over from their tokens. A request that is hit in a second step ends.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from protocol.ids import RequestId, TenantId
from worker.cache.page_cache import Lease, PageCache
from worker.cache.page_pool import PageId
from worker.executor import Executor
from worker.scheduler import Scheduler
from worker.scrub_pace import ScrubPace
from worker.sequence import Sequence, State

_log = structlog.get_logger(__name__)

ViolationKind = Literal["lease", "read", "prefix", "scrub"]
MAX_KEPT_EVENTS = 1000
WALKED_PER_STEP = 1


@dataclass(frozen=True, slots=True)
class IntegrityEvent:
    """A violation, for the audit stream: whose page, which one, found how. `layer` is -1 where the table was wrong, not the bytes."""

    kind: ViolationKind
    tenant: TenantId
    request_id: RequestId | None
    page: int
    layer: int
    times: int


@dataclass(slots=True)
class IntegrityTotals:
    """Counts since the start."""

    violations: Counter[str] = field(default_factory=Counter)
    pages_checked: int = 0
    quarantined: int = 0
    scrubbed: int = 0
    healed: int = 0

    @property
    def num_violations(self) -> int:
        """Of all kinds."""
        return self.violations.total()

    def snapshot(self) -> tuple[tuple[str, int], ...]:
        """All counts by name; those of violations begin with "violations_"."""
        counts = {f"violations_{kind}": count for kind, count in sorted(self.violations.items())}
        counts |= {name: getattr(self, name) for name in ("pages_checked", "quarantined", "scrubbed", "healed")}
        return tuple(counts.items())


class Integrity:
    """Watches over one engine's pages. `fail` ends a request that was hit twice; `now` returns seconds."""

    def __init__(
        self,
        cache: PageCache,
        scheduler: Scheduler,
        executor: Executor,
        fail: Callable[[Sequence], None],
        now: Callable[[], float],
    ) -> None:
        self.totals = IntegrityTotals()
        self._cache = cache
        self._scheduler = scheduler
        self._executor = executor
        self._fail = fail
        self._pace = ScrubPace(now)
        self._events: list[IntegrityEvent] = []
        self._cursor = 0
        self._step = 0
        if executor.has_seals:
            scheduler.inspect = self._num_sound

    def take_events(self) -> list[IntegrityEvent]:
        """The events that have gathered."""
        events, self._events = self._events, []
        return events

    def begin_step(self) -> None:
        """Violations of one request within a step count once."""
        self._step += 1

    def lease_violation(self, sequence: Sequence) -> None:
        """A sequence's table leads to a page of another life or owner."""
        tags = self._cache.pool.tags
        bad = [lease for lease in sequence.table.leases if int(tags[lease.page]) != lease.tag]
        self._note("lease", sequence, bad[0].page if bad else -1, -1)
        self._cache.quarantine(bad)
        self._heal(sequence)

    def read_violation(self, sequence: Sequence, place: int, layer: int) -> None:
        """A pass read a page of the sequence whose seal was wrong."""
        lease = sequence.table.leases[place]
        self._note("read", sequence, lease.page, layer)
        self._quarantine([lease])
        self._executor.mend()
        self._heal(sequence)

    def walk_on(self) -> None:
        """After a step: zero what is to be zeroed, and verify the next page if the walk has the time."""
        if not self._pace.is_due():
            self.scrub(0)
            return
        with self._pace.charged():
            self.scrub(WALKED_PER_STEP)

    def scrub(self, num_pages: int) -> None:
        """Zero quarantined pages that nobody holds, so that they can be used again; then verify the next whole pages of the pool."""
        pool = self._cache.pool
        for page in pool.quarantined():
            if not pool.is_held(page):
                self._executor.scrub(page)
                pool.restore(page)
                self.totals.scrubbed += 1
        if self._executor.has_seals and pool.whole_pages():
            self._walk(num_pages)

    def _walk(self, num_pages: int) -> None:
        whole = self._cache.pool.whole_pages()
        pages = []
        for _ in range(min(num_pages, self._cache.pool.num_pages)):
            page = PageId(self._cursor)
            self._cursor = (self._cursor + 1) % self._cache.pool.num_pages
            if page in whole:
                pages.append(page)
        if not pages:
            return
        layers = self._executor.verify(pages, [whole[page] for page in pages])
        self.totals.pages_checked += len(pages)
        for page, layer in zip(pages, layers, strict=True):
            if layer >= 0:
                self._found_by_walk(page, layer)

    def _found_by_walk(self, page: PageId, layer: int) -> None:
        self._executor.mend()
        holders = [s for s in self._scheduler.running if any(lease.page == page for lease in s.table.leases)]
        self._note("scrub", holders[0] if holders else None, page, layer)
        self._quarantine([Lease(page, 0)])
        for sequence in holders:
            self._heal(sequence)

    def _num_sound(self, sequence: Sequence, leases: list[Lease], digests: list[bytes]) -> int:
        """How many pages of a found prefix are sealed as this reader expects; the first that isn't is quarantined."""
        if not leases:
            return 0
        namespace = sequence.request.namespace
        keys = [namespace.page_key(d, lease.tag, is_whole=True) for d, lease in zip(digests, leases, strict=True)]
        layers = self._executor.verify([lease.page for lease in leases], keys)
        self.totals.pages_checked += len(leases)
        for place, layer in enumerate(layers):
            if layer >= 0:
                self._note("prefix", sequence, leases[place].page, layer)
                self._quarantine([leases[place]])
                self._executor.mend()
                return place
        return len(leases)

    def _quarantine(self, leases: Iterable[Lease]) -> None:
        self._cache.quarantine(leases)

    def _note(self, kind: ViolationKind, sequence: Sequence | None, page: int, layer: int) -> None:
        request = sequence.request if sequence is not None else None
        event = IntegrityEvent(
            kind=kind,
            tenant=sequence.tenant if sequence is not None else TenantId(""),
            request_id=request.job.request_id if request is not None else None,
            page=page,
            layer=layer,
            times=request.violations + 1 if request is not None else 1,
        )
        self.totals.violations[kind] += 1
        self.totals.quarantined += page >= 0
        if len(self._events) < MAX_KEPT_EVENTS:
            self._events.append(event)
        _log.error(
            "kv_integrity_violation", kind=kind, tenant=event.tenant, request_id=event.request_id, page=page, layer=layer,
            times=event.times,
        )  # fmt: skip

    def _heal(self, sequence: Sequence) -> None:
        """Start a sequence over; end its request if it was hit in an earlier step too."""
        request = sequence.request
        if sequence.state is not State.RUNNING:
            return
        if request.violated_in_step != self._step:
            request.violated_in_step = self._step
            request.violations += 1
        if request.violations > 1:
            self._fail(sequence)
        else:
            self._scheduler.preempt(sequence)
            self.totals.healed += 1
