"""One admitted request: what it took, and what it has used so far."""

import json
from dataclasses import astuple, dataclass, field
from typing import Any

from gateway.intake.call import GenerationCall
from gateway.limits.charges import Charge
from gateway.pending_job import PendingJob
from protocol.errors import DecodeError
from protocol.ids import ModelName, TenantId
from protocol.limits import Price
from protocol.replies import Done, Failed
from protocol.usage import Outcome, UsageRow


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens that were really computed, and times."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: int = 0
    ttft_ms: int = 0
    total_ms: int = 0

    def to_text(self) -> str:
        """For the progress hash."""
        return json.dumps(list(astuple(self)))

    @classmethod
    def from_text(cls, text: str) -> "Counts":
        """The inverse; raises DecodeError."""
        values = _json_list(text, 6)
        if any(type(value) is not int for value in values):
            raise DecodeError("not the progress of a request")
        return cls(*values)


@dataclass(frozen=True, slots=True)
class Note:
    """What a row needs beside counts; kept with the reservation, so that any gateway can settle it."""

    key_id: str
    model: ModelName
    samples: int
    price: tuple[int, int, int]
    whats: tuple[str, ...]  # of the charges, in order

    def to_text(self) -> str:
        """For the record of the open request."""
        return json.dumps([self.key_id, self.model, self.samples, list(self.price), list(self.whats)])

    @classmethod
    def from_text(cls, text: str) -> "Note":
        """The inverse; raises DecodeError."""
        key_id, model, samples, price, whats = _json_list(text, 5)
        return cls(key_id, ModelName(model), samples, (price[0], price[1], price[2]), tuple(whats))

    def row(
        self,
        request: str,
        tenant: TenantId,
        counts: Counts,
        outcome: Outcome,
        code: str,
        started_ms: int,
        ended_ms: int,
    ) -> UsageRow:
        """The row of a request that has ended."""
        cost = Price(*self.price).cost(counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
        return UsageRow(
            request=request, tenant=tenant, key=self.key_id, model=self.model, outcome=outcome, code=code,
            samples=self.samples, started_ms=started_ms, ended_ms=ended_ms, prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens, completion_tokens=counts.completion_tokens, cost_nanos=cost,
            queue_ms=counts.queue_ms, ttft_ms=counts.ttft_ms, total_ms=counts.total_ms,
        )  # fmt: skip

    def true_amounts(self, row: UsageRow | None) -> list[int]:
        """What each charge should have been; nothing if the request wasn't accepted after all."""
        if row is None:
            return [0] * len(self.whats)
        tokens = row.prompt_tokens + row.completion_tokens
        true = {"requests": 1, "tokens": tokens, "budget_tokens": tokens, "budget_money": row.cost_nanos}
        return [true.get(what, 0) for what in self.whats]


@dataclass(slots=True, eq=False)
class Account:
    """An admitted request while it's answered."""

    id: str
    tenant: TenantId
    note: Note
    charges: list[Charge]
    call: GenerationCall = field(repr=False)
    jobs: list[PendingJob]
    opened_s: float  # of the event loop's clock
    started_ms: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    final: Counts | None = None  # once it has ended
    num_released: int = 0  # jobs that are known to have left the queue

    def counts(self, now_s: float) -> Counts:
        """What was computed until now."""
        if self.final is not None:
            return self.final
        used = [_used(job, len(self.call.prompts[job.slot])) for job in self.jobs]
        starts = [job.started_s for job in self.jobs if job.started_s is not None]
        firsts = [job.first_token_s for job in self.jobs if job.first_token_s is not None]
        return Counts(
            sum(prompt for prompt, _, _ in used),
            sum(cached for _, cached, _ in used),
            sum(completion for _, _, completion in used),
            self._since(min(starts)) if starts else 0,
            self._since(min(firsts)) if firsts else 0,
            self._since(now_s),
        )

    def outcome(self) -> tuple[Outcome, str]:
        """How it ended, and the code if it failed."""
        for job in self.jobs:
            if isinstance(job.last, Failed):
                return ("cancelled", "") if job.last.code == "cancelled" else ("failed", job.last.code)
        if all(isinstance(job.last, Done) for job in self.jobs):
            return "completed", ""
        if not all(job.is_accepted for job in self.jobs):
            return "failed", "not_queued"
        return "cancelled", ""

    @property
    def was_accepted(self) -> bool:
        """Whether any of its jobs reached the queue."""
        return any(job.is_accepted for job in self.jobs)

    def _since(self, moment_s: float) -> int:
        return max(round((moment_s - self.opened_s) * 1000), 0)


def _used(job: PendingJob, num_prompt: int) -> tuple[int, int, int]:
    """Prompt, cached and completion tokens of a job."""
    last = job.last
    if isinstance(last, Done):
        return last.prompt_tokens, last.cached_tokens, last.completion_tokens
    if not job.has_started:
        return 0, 0, 0
    return num_prompt, job.cached_tokens, job.completion_tokens


def _json_list(text: str, length: int) -> list[Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or len(values) != length:
        raise DecodeError("not a list of the expected length")
    return values
