"""One job of a request, from before it's submitted until its terminal reply, over all its attempts."""

from dataclasses import dataclass, field, replace

from gateway.mailbox import Mailbox
from protocol.ids import ModelName, RequestId, WorkerId
from protocol.job import Job, Progress, SampleProgress
from protocol.replies import (
    LAST_SEQUENCE,
    REPLY_ORDER,
    Delta,
    Done,
    Failed,
    FinishReason,
    PromptLogprobs,
    Reply,
    ReplyEnvelope,
    Started,
)


@dataclass(slots=True)
class _Sample:
    """What has come of one sample."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class PendingJob:
    """`job` is the present attempt. Times are seconds of the event loop's clock."""

    job: Job
    slot: int
    mailbox: Mailbox
    deadline_s: float
    is_accepted: bool = False  # the queue has said that it has the job
    worker_id: WorkerId | None = None  # of this attempt
    has_started: bool = False  # in some attempt
    unserved_since_s: float | None = None
    heard_s: float = 0.0
    completion_tokens: int = 0
    started_s: float | None = None  # when a worker took it, and when its first token came
    first_token_s: float | None = None
    last: Done | Failed | None = None
    has_failed_here: bool = False  # ended from this side: its worker may still be at it
    proposal: Job | None = None  # the next attempt, while it isn't known whether Redis has taken it
    _samples: list[_Sample] = field(default_factory=list)
    _cached_tokens: int = 0
    _has_prompt_logprobs: bool = False
    _held: list[ReplyEnvelope] = field(default_factory=list)
    _next_sequence: int = 0
    _last_kind: type | None = None

    def __post_init__(self) -> None:
        self._samples = [_Sample() for _ in range(self.job.n)]

    @property
    def request_id(self) -> RequestId:
        """The job's name, the same in all attempts."""
        return self.job.request_id

    @property
    def model(self) -> ModelName:
        """The model that it's for."""
        return self.job.model

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompt that were found in the cache, as far as a worker has said."""
        return self._cached_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its terminal reply has come."""
        return self.last is not None

    def receive(self, envelope: ReplyEnvelope, now_s: float = 0.0) -> None:
        """Take a reply if it is the next one. Duplicates and stale attempts are dropped; a gap or a wrong order ends the job."""
        if self.proposal is not None:
            self._held.append(envelope)
            return
        if self.is_finished or envelope.attempt != self.job.attempt:
            return
        reply = envelope.reply
        is_last_word = envelope.sequence == LAST_SEQUENCE and isinstance(reply, Failed)
        if not is_last_word:
            if envelope.sequence < self._next_sequence:
                return
            if envelope.sequence > self._next_sequence or type(reply) not in REPLY_ORDER[self._last_kind]:
                self.fail(Failed("internal_error", "part of the answer was lost on its way"))
                return
        self._next_sequence = envelope.sequence + 1
        self._last_kind = type(reply)
        self.heard_s = now_s
        self._note(reply)

    def fail(self, failed: Failed) -> None:
        """End the job from this side."""
        if not self.is_finished:
            self.has_failed_here = True
            self._note(failed)

    def propose(self) -> Job:
        """The job that continues this one from what has come of it. What comes from here on waits for `accept` or `reject`: it's either part of
        the answer, or computed again.
        """
        if self.proposal is None:
            self.proposal = self._next_attempt()
        return self.proposal

    def accept(self, now_s: float) -> None:
        """The proposed attempt has begun: from here on only its replies count."""
        assert self.proposal is not None
        self.job = self.proposal
        self.worker_id = None
        self.unserved_since_s = None
        self.heard_s = now_s
        self._next_sequence = 0
        self._last_kind = None
        self._release(now_s)

    def reject(self, now_s: float) -> None:
        """The present attempt goes on."""
        self._release(now_s)

    def _release(self, now_s: float) -> None:
        held, self._held, self.proposal = self._held, [], None
        for envelope in held:
            self.receive(envelope, now_s)

    def _next_attempt(self) -> Job:
        samples = tuple(SampleProgress(tuple(sample.token_ids), sample.finish_reason) for sample in self._samples)
        has_progress = any(sample.token_ids or sample.finish_reason for sample in samples)
        return replace(
            self.job,
            attempt=self.job.attempt + 1,
            progress=Progress(samples, self._cached_tokens) if has_progress else None,
            prompt_logprobs=None if self._has_prompt_logprobs else self.job.prompt_logprobs,
        )

    def finish_if_complete(self) -> bool:
        """If nothing but the last word is missing, say it: all samples have ended, and what they cost is known."""
        if self.is_finished or self.proposal or any(sample.finish_reason is None for sample in self._samples):
            return False
        self._note(Done(len(self.job.prompt_token_ids), self._cached_tokens, self.completion_tokens))
        return True

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, Started):
            self.worker_id = reply.worker_id
            self.has_started = True
            self.started_s = self.started_s or self.heard_s
            return
        if isinstance(reply, Delta):
            self._note_delta(reply)
        elif isinstance(reply, PromptLogprobs):
            self._has_prompt_logprobs = True
        else:
            self.last = reply
        self.mailbox.put(self.slot, reply)

    def _note_delta(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self.first_token_s = self.first_token_s or self.heard_s
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        if 0 <= delta.index < len(self._samples):
            sample = self._samples[delta.index]
            sample.token_ids.extend(delta.token_ids)
            sample.finish_reason = delta.finish_reason
