"""Which tenant's sequence is admitted next: the one that has been served least, in weighted tokens.

A virtual token counter for each active tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant that comes
back from idleness starts at the smallest counter of the active ones, so that nobody saves up service. Cache hits don't
lower the charge of anybody else, and the order never depends on them: it would tell tenants about each other's prompts.
"""

from collections import deque

from protocol.ids import TenantId
from worker.sequence import Sequence

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2


class FairQueue:
    """Waiting sequences, a line for each tenant."""

    def __init__(self) -> None:
        self._lines: dict[TenantId, deque[Sequence]] = {}
        self._served: dict[TenantId, int] = {}
        self._running: dict[TenantId, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, sequence: Sequence) -> None:
        """At the end of its tenant's line."""
        self._activate(sequence.tenant)
        self._lines[sequence.tenant].append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """At the head of its tenant's line: it was running before."""
        self._activate(sequence.tenant)
        self._lines[sequence.tenant].appendleft(sequence)

    def candidates(self) -> list[Sequence]:
        """The first sequence of each tenant's line that may start, the least served tenant's first."""
        tenants = sorted((t for t, line in self._lines.items() if line), key=lambda t: (self._served[t], t))
        heads = (next((s for s in self._lines[t] if s.may_start()), None) for t in tenants)
        return [head for head in heads if head is not None]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its line: it was admitted or cancelled."""
        self._lines[sequence.tenant].remove(sequence)
        self._forget_if_idle(sequence.tenant)

    def started(self, tenant: TenantId) -> None:
        """One more of the tenant's sequences runs."""
        self._activate(tenant)
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def stopped(self, tenant: TenantId) -> None:
        """One less of the tenant's sequences runs."""
        self._running[tenant] -= 1
        self._forget_if_idle(tenant)

    def charge(self, tenant: TenantId, prompt_tokens: int, output_tokens: int) -> None:
        """Count service that was given."""
        self._served[tenant] += PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: TenantId) -> int:
        """Weighted tokens counted for an active tenant."""
        return self._served[tenant]

    def _activate(self, tenant: TenantId) -> None:
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0)
            self._lines[tenant] = deque()

    def _forget_if_idle(self, tenant: TenantId) -> None:
        if not self._lines[tenant] and not self._running.get(tenant):
            del self._lines[tenant], self._served[tenant]
            self._running.pop(tenant, None)
