"""Replies on their way from the one reader of this process to the request that waits for them."""

import asyncio
from dataclasses import dataclass, replace

from protocol.ids import ModelName, RequestId, WorkerId
from protocol.replies import (
    LAST_SEQUENCE,
    REPLY_ORDER,
    Delta,
    Done,
    Failed,
    Reply,
    ReplyEnvelope,
    Started,
)

# More than a model's context; a client that lets as many tokens pile up is not reading at all.
MAX_WAITING_REPLIES = 1 << 17


class Mailbox:
    """What has arrived for one HTTP request, over all its jobs: (job number, reply) in order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Reply]] = []
        self._arrived = asyncio.Event()

    def put(self, slot: int, reply: Reply) -> None:
        """Add a reply."""
        self._waiting.append((slot, reply))
        self._arrived.set()

    @property
    def is_empty(self) -> bool:
        """Whether all that has come was taken."""
        return not self._waiting

    @property
    def is_overfull(self) -> bool:
        """Whether nobody seems to read."""
        return len(self._waiting) > MAX_WAITING_REPLIES

    async def take(self) -> list[tuple[int, Reply]]:
        """All that's there, waiting for something if there is nothing."""
        await self._arrived.wait()
        self._arrived.clear()
        waiting, self._waiting = self._waiting, []
        return waiting if len(waiting) < 2 else _joined(waiting)


def _joined(waiting: list[tuple[int, Reply]]) -> list[tuple[int, Reply]]:
    """The same replies with all that waited of one sample as one delta, at the place of its first: who is behind writes less."""
    joined: list[tuple[int, Reply]] = []
    deltas: dict[tuple[int, int], list[Delta]] = {}
    for slot, reply in waiting:
        if isinstance(reply, Delta):
            found = deltas.get((slot, reply.index))
            if found is not None:
                found.append(reply)
                continue
            deltas[slot, reply.index] = [reply]
        joined.append((slot, reply))
    for place, (slot, reply) in enumerate(joined):
        if isinstance(reply, Delta) and len(parts := deltas[slot, reply.index]) > 1:
            joined[place] = (slot, _sum(parts))
    return joined


def _sum(parts: list[Delta]) -> Delta:
    return replace(
        parts[0],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish_reason=parts[-1].finish_reason,
    )


@dataclass(slots=True, eq=False)
class PendingJob:
    """One job of a request, from before it's submitted until its terminal reply."""

    request_id: RequestId
    model: ModelName
    slot: int
    mailbox: Mailbox
    deadline_s: float  # of the event loop's clock
    attempt: int = 1
    entry_id: bytes | None = None
    worker_id: WorkerId | None = None
    unserved_since_s: float | None = None
    completion_tokens: int = 0
    last: Done | Failed | None = None
    has_failed_here: bool = False  # ended from this side: its worker may still be at it
    _next_sequence: int = 0
    _last_kind: type | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its terminal reply has come."""
        return self.last is not None

    def receive(self, envelope: ReplyEnvelope) -> None:
        """Take a reply if it is the next one. Duplicates and stale attempts are dropped; a gap or a wrong order ends the job."""
        if self.is_finished or envelope.attempt != self.attempt:
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
        self._note(reply)

    def fail(self, failed: Failed) -> None:
        """End the job from this side."""
        if not self.is_finished:
            self.has_failed_here = True
            self._note(failed)

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, Started):
            self.worker_id = reply.worker_id
            return
        if isinstance(reply, Delta):
            self.completion_tokens += len(reply.token_ids)
        elif isinstance(reply, (Done, Failed)):
            self.last = reply
        self.mailbox.put(self.slot, reply)
