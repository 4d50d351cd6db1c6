"""The engine: requests in, replies out, one step at a time. Knows no Redis, no asyncio and no clock but the one it's given.

A request ends in exactly one terminal reply, whatever happens to it: all ways out lead through `_end`.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

import structlog

from protocol.ids import RequestId, TenantId, WorkerId
from protocol.job import Job
from protocol.model_card import BATCH_SIZE_BOUNDS
from protocol.replies import (
    Delta,
    Done,
    Failed,
    FailureCode,
    PromptLogprobs,
    Reply,
    ReplyEnvelope,
    Started,
    TokenLogprob,
)
from protocol.routing import RoutingKeys
from worker.cache.namespace import Namespace, NamespaceRing
from worker.cache.page_cache import Lease, PageCache
from worker.errors import DeviceLostError
from worker.executor import ChunkResult, Executor, StepBatch, prompt_logit_positions
from worker.integrity import Integrity
from worker.outgoing import Outgoing
from worker.resume import progress_problem, take_up
from worker.sampling import NotFinite, Sampled, SamplerRow
from worker.sampling.logprobs import Top
from worker.scheduler import Chunk, Scheduler
from worker.sequence import Request, Sequence, State
from worker.text import TextStream

_log = structlog.get_logger(__name__)

CANCEL_MEMORY_S = 120.0
MAX_REMEMBERED_CANCELS = 10_000
SCRUBBED_WHEN_IDLE = 16


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is composed of. `now` returns seconds of a clock that only moves forward, `now_ms` Unix milliseconds."""

    executor: Executor
    namespaces: NamespaceRing
    token_bytes: tuple[bytes, ...]
    eos_token_ids: frozenset[int]
    max_request_tokens: int
    worker_id: WorkerId
    checks_leases: bool
    now: Callable[[], float]
    now_ms: Callable[[], int]
    routing: RoutingKeys | None = None  # without it nobody is told what's in the cache


@dataclass(slots=True)
class EngineTotals:
    """Counts since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failed_requests: int = 0
    batch_sizes: list[int] = field(default_factory=lambda: [0] * (len(BATCH_SIZE_BOUNDS) + 1))
    batched_sequences: int = 0

    def count_step(self, num_sequences: int) -> None:
        """A step over so many sequences."""
        self.steps += 1
        self.batched_sequences += num_sequences
        self.batch_sizes[bisect_left(BATCH_SIZE_BOUNDS, num_sequences)] += 1


class Engine:
    """Owns the scheduler, the page cache and all requests of a worker. Not thread-safe: one thread calls it."""

    def __init__(self, parts: EngineParts, max_sequences: int, step_tokens: int) -> None:
        self.cache = PageCache(parts.executor.num_pages, parts.executor.page_size)
        self.scheduler = Scheduler(self.cache, max_sequences, step_tokens)
        self.totals = EngineTotals()
        self.integrity = Integrity(self.cache, self.scheduler, parts.executor, self._fail_violated, parts.now)
        self._parts = parts
        self._requests: dict[RequestId, Request] = {}
        self._cancelled: dict[RequestId, float] = {}
        self._outbox: list[Outgoing] = []

    @property
    def executor(self) -> Executor:
        """What computes its steps."""
        return self._parts.executor

    @property
    def namespaces(self) -> NamespaceRing:
        """Where its namespaces come from."""
        return self._parts.namespaces

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return bool(self._requests)

    def submit(self, job: Job) -> None:
        """Take a job. One that can't be served gets its terminal reply at once."""
        assert job.request_id not in self._requests, "the consumer drops second deliveries"
        request = Request(job, self._namespace(job))
        self._requests[job.request_id] = request
        self._reply(request, Started(self._parts.worker_id))
        if self._cancelled.pop(job.request_id, None) is not None:
            self._fail(request, "cancelled", "the request was cancelled")
        elif (problem := self._problem(job)) is not None:
            self._fail(request, "invalid_job", problem)
        else:
            self._begin(request)

    def _namespace(self, job: Job) -> Namespace:
        return self._parts.namespaces.namespace(job.tenant, job.cache_salt, job.share_group, job.tenant_since_ms)

    def forget(self, tenant: TenantId) -> None:
        """A tenant was deleted: end its requests, and zero every page that was last its own, those that are free again included."""
        self.cache.quarantine([Lease(page, 0) for page in self.cache.pool.pages_of(tenant)])
        for request in [r for r in self._requests.values() if r.job.tenant == tenant]:
            self._fail(request, "cancelled", "the tenant was deleted")
        self.integrity.scrub(0)

    def cancel(self, request_id: RequestId) -> None:
        """Drop a request. One that has not arrived yet is dropped when it does; one that's gone is none of our business."""
        request = self._requests.get(request_id)
        if request is not None:
            self._fail(request, "cancelled", "the request was cancelled")
            return
        now = self._parts.now()
        self._cancelled.pop(request_id, None)
        self._cancelled[request_id] = now + CANCEL_MEMORY_S
        # Oldest first: every worker hears of all cancellations, so each must cost little, and the latest is the likeliest to be met.
        while len(self._cancelled) > MAX_REMEMBERED_CANCELS or next(iter(self._cancelled.values())) <= now:
            del self._cancelled[next(iter(self._cancelled))]

    def drop(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request if this attempt of it is here."""
        request = self._requests.get(request_id)
        if request is not None and request.job.attempt == attempt:
            self._fail(request, "cancelled", "the request is computed elsewhere")

    def fail_all(self, code: FailureCode, message: str) -> None:
        """End every request."""
        for request in list(self._requests.values()):
            self._fail(request, code, message)

    def step(self) -> list[Outgoing]:
        """Schedule, execute, sample, commit; returns the replies that this and the calls before it caused."""
        self._expire()
        self.integrity.begin_step()
        chunks = self.scheduler.plan()
        if chunks:
            batch = self._without_stale_pages(self._parts.executor.build(chunks))
            if batch is not None and (results := self._execute(batch)) is not None:
                self._commit(batch, results)
            self.totals.count_step(len(chunks))
        self.integrity.walk_on()
        return self.take_replies()

    def take_replies(self) -> list[Outgoing]:
        """The replies that have gathered."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # -- in ----------------------------------------------------------------------------------------------------------

    def _problem(self, job: Job) -> str | None:
        """Why a signed job can't be served all the same; the gateway has checked most of it against the same card."""
        vocab_size = len(self._parts.token_bytes)
        if not job.prompt_token_ids:
            return "the prompt is empty"
        if min(job.prompt_token_ids) < 0 or max(job.prompt_token_ids) >= vocab_size:
            return "the prompt has token ids outside the vocabulary"
        if job.sampling.max_tokens < 0 or not 1 <= job.n <= 128:
            return "max_tokens or n is out of range"
        if len(job.prompt_token_ids) + job.sampling.max_tokens > self._parts.max_request_tokens:
            return f"prompt and max_tokens exceed the {self._parts.max_request_tokens} tokens that this worker can hold"
        return progress_problem(job, vocab_size)

    def _begin(self, request: Request) -> None:
        """Set its sequences up: from the start, or where an earlier attempt was."""
        request.sequences = [self._sequence(request, index) for index in range(request.job.n)]
        progress = request.job.progress
        if progress is not None:
            request.cached_tokens = progress.cached_tokens
            for sequence, sample in zip(request.sequences, progress.samples, strict=True):
                take_up(sequence, sample, self._new_text(request.job))
        for sequence in request.sequences:
            if sequence.state is not State.FINISHED:
                self.scheduler.add(sequence)
        if request.is_finished:
            self._end(request, self._done(request))

    def _new_text(self, job: Job) -> TextStream:
        return TextStream(self._parts.token_bytes, job.sampling.stop, job.sampling.min_tokens)

    def _sequence(self, request: Request, index: int) -> Sequence:
        job = request.job
        return Sequence(
            request=request,
            index=index,
            tokens=list(job.prompt_token_ids),
            sampler=SamplerRow(
                job.sampling,
                index=index,
                prompt_token_ids=job.prompt_token_ids,
                eos_token_ids=self._parts.eos_token_ids,
                vocab_size=len(self._parts.token_bytes),
            ),
            text=self._new_text(job),
            trail=None if self._parts.routing is None else self._parts.routing.trail(job),
        )

    def _expire(self) -> None:
        now_ms = self._parts.now_ms()
        for request in [r for r in self._requests.values() if r.job.deadline_ms <= now_ms]:
            self._fail(request, "deadline_exceeded", "the request's time limit has passed")

    # -- step --------------------------------------------------------------------------------------------------------

    def _without_stale_pages(self, batch: StepBatch) -> StepBatch | None:
        """The batch, less the sequences whose pages aren't theirs any more: those start over, once."""
        if not self._parts.checks_leases:
            return batch
        stale = batch.stale_chunks(self.cache.pool)
        if not stale:
            return batch
        for chunk in stale:
            self.integrity.lease_violation(chunk.sequence)
        sound = [c for c in batch.chunks if c.sequence.state is State.RUNNING]
        return self._parts.executor.build(sound) if sound else None

    def _execute(self, batch: StepBatch) -> list[ChunkResult] | None:
        """The forward pass. An error in it is the batch's, not the worker's: its requests end, the others go on. Raises DeviceLostError."""
        try:
            return self._parts.executor.run(batch, self.cache.pool)
        except DeviceLostError:
            raise
        except Exception as error:
            _log.exception("forward_failed", error=type(error).__name__, num_sequences=len(batch.chunks))
            for chunk in batch.chunks:
                self._fail_unsound(chunk.sequence.request)
            return None

    def _commit(self, batch: StepBatch, results: list[ChunkResult]) -> None:
        """Let each sequence take its result."""
        for chunk, result in zip(batch.chunks, results, strict=True):
            if chunk.sequence.state is not State.RUNNING:
                continue  # its request failed with a sample that came earlier in this loop
            if result.violation is not None:
                self.integrity.read_violation(chunk.sequence, result.violation.place, result.violation.layer)
                continue
            self.scheduler.commit(chunk)
            if result.prompt:
                self._note_prompt_logprobs(chunk, result.prompt)
            if result.sampled is not None:
                self._advance(chunk.sequence, result.sampled)

    def _note_prompt_logprobs(self, chunk: Chunk, found: ListLike[tuple[float, Top]]) -> None:
        request = chunk.sequence.request
        following = [chunk.sequence.tokens[position + 1] for position in prompt_logit_positions(chunk)]
        if not request.prompt_entries:
            request.prompt_entries.append(None)
        for token_id, (logprob, top) in zip(following, found, strict=True):
            request.prompt_entries.append(self._entry(token_id, logprob, top))

    def _advance(self, sequence: Sequence, result: Sampled | NotFinite) -> None:
        """A sequence is up to date and has a result for its next token."""
        request = sequence.request
        if isinstance(result, NotFinite):
            self._fail_unsound(request)
            return
        self.scheduler.publish(sequence)
        self._report_prompt(request)
        sampling = request.job.sampling
        if sampling.max_tokens == 0:
            self._finish(sequence, Delta(sequence.index, "", (), (), "length", request.first_cached_tokens()))
            return
        is_known = bool(sequence.repeated)
        if is_known and sequence.repeated.popleft() != result.token_id:
            # It would be spliced from two answers: another build, or a fault.
            self._fail(request, "internal_error", "the answer could not be continued as it had begun")
            return
        sequence.tokens.append(result.token_id)
        sequence.sampler.observe(result.token_id)
        self.totals.generated_tokens += 1
        entry = None
        if result.logprob is not None:
            entry = self._entry(result.token_id, result.logprob, result.top)
        is_full = sequence.num_output >= sampling.max_tokens
        released = sequence.text.push(
            result.token_id, entry, ends_text=sequence.sampler.ends_with(result.token_id), is_full=is_full
        )
        if is_known:
            return  # the client has it
        delta = Delta(
            sequence.index, released.text, (result.token_id,), tuple(released.entries), released.finish_reason,
            request.first_cached_tokens(),
        )  # fmt: skip
        if released.finish_reason is not None:
            self._finish(sequence, delta)
        else:
            self._reply(request, delta)

    def _report_prompt(self, request: Request) -> None:
        """Once a prompt is computed, count it and tell its logprobs if they were asked for."""
        if request.is_prompt_reported:
            return
        request.is_prompt_reported = True
        self.totals.prompt_tokens += len(request.job.prompt_token_ids)
        self.totals.cached_tokens += request.cached_tokens
        if request.job.prompt_logprobs is not None:
            tokens = tuple(self._parts.token_bytes[token] for token in request.job.prompt_token_ids)
            self._reply(request, PromptLogprobs(tokens, tuple(request.prompt_entries or [None])))

    def scrub(self) -> None:
        """While there is no work: walk on through the pool."""
        self.integrity.scrub(SCRUBBED_WHEN_IDLE)

    # -- out ---------------------------------------------------------------------------------------------------------

    def _entry(self, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]) -> TokenLogprob:
        token_bytes = self._parts.token_bytes
        return TokenLogprob(
            token_id, token_bytes[token_id], logprob, tuple((i, token_bytes[i], value) for i, value in top)
        )

    def _finish(self, sequence: Sequence, last: Delta) -> None:
        request = sequence.request
        sequence.finish_reason = last.finish_reason
        self.scheduler.finish(sequence)
        self._reply(request, last)
        if request.is_finished:
            self._end(request, self._done(request))

    def _done(self, request: Request) -> Done:
        return Done(len(request.job.prompt_token_ids), request.cached_tokens, request.completion_tokens)

    def _fail_unsound(self, request: Request) -> None:
        """Something not finite came out of the request's pages: none of them is believed, or used again before a scrub."""
        for sequence in request.sequences:
            self.cache.quarantine(sequence.table.leases)
        self._fail(request, "internal_error", "the model produced no usable output for this request")

    def _fail_violated(self, sequence: Sequence) -> None:
        self._fail(sequence.request, "kv_integrity_error", "the request's KV cache failed its integrity check twice")

    def _fail(self, request: Request, code: FailureCode, message: str) -> None:
        """End a request with an error. Harmless if it has ended: two samples of one request may fail in one step."""
        if self._requests.get(request.job.request_id) is not request:
            return
        for sequence in request.sequences:
            self.scheduler.finish(sequence)
        if code != "cancelled":
            self.totals.failed_requests += 1
            _log.warning("request_failed", request_id=request.job.request_id, tenant=request.job.tenant, code=code)
        self._end(request, Failed(code, message, request.completion_tokens))

    def _end(self, request: Request, terminal: Done | Failed) -> None:
        self._reply(request, terminal)
        del self._requests[request.job.request_id]

    def _reply(self, request: Request, reply: Reply) -> None:
        job = request.job
        envelope = ReplyEnvelope(job.request_id, job.attempt, request.num_replies, reply)
        request.num_replies += 1
        num_prompt = len(job.prompt_token_ids) if request.is_prompt_reported else 0
        self._outbox.append(Outgoing(job.gateway_id, job.line, envelope, num_prompt))

    def check_invariants(self) -> None:
        """Sequences, pages and requests agree."""
        self.scheduler.check_invariants()
        live = {id(s) for r in self._requests.values() for s in r.sequences if s.state is State.RUNNING}
        assert live == {id(sequence) for sequence in self.scheduler.running}
