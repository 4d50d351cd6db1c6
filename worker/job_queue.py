"""A worker's side of its model's queue: each method is one script, or the wait for the doorbell."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.ids import GatewayId, ModelName, RequestId, WorkerId
from protocol.pull_script import PULL
from protocol.queue_lua import OUTPUT_WEIGHT
from protocol.queue_scripts import ABANDON, BURY, EXPIRED, PUBLISH, RELEASE, RENEW, RING
from protocol.replies import Failed, ReplyEnvelope, encode_replies
from worker.redis_link import BLOCK_MS, RedisLink

MAX_EXPIRED = 100
SENT, STALE, ORPHAN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PulledJob:
    """An entry of a line that's in this worker's hands. `attempt` 0: no gateway submitted it."""

    request_id: RequestId
    line: str
    entry_id: str
    attempt: int
    gateway_id: GatewayId
    deliveries: int
    envelope: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Holding:
    """A job that this worker holds, as far as the queue needs to know it."""

    request_id: RequestId
    attempt: int
    line: str


@dataclass(frozen=True, slots=True)
class Outbound:
    """What a job has to say, and what it cost if it ends with that."""

    holding: Holding
    payload: bytes = field(repr=False)
    is_terminal: bool = False
    cost_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExpiredJob:
    """A job whose worker hasn't been heard of for too long."""

    request_id: RequestId
    gateway_id: GatewayId
    line: str


def cost_tokens(prompt: int, cached: int, completion: int) -> int:
    """What a job counts for in its tenant's virtual time."""
    return max(prompt - cached, 0) + OUTPUT_WEIGHT * completion


class JobQueue:
    """The queue of one model, for one worker. Errors of the client pass through."""

    def __init__(self, link: RedisLink, model: ModelName, worker_id: WorkerId, lease_ms: int) -> None:
        self._link = link
        self._model = model
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._keys = link.keys.queue(model)
        self._fixed = self._keys.all()
        self._bell = link.keys.bell(model, worker_id)
        self._likely: list[str] = []
        self._wait_s = BLOCK_MS / 1000

    async def pull(self, num_jobs: int, room: int) -> PulledJob | None:
        """The next job, in this worker's hands from now on; None if nothing waits for it. It's at `num_jobs`, and could take `room` more."""
        lines = self._likely
        while True:
            streams = [self._line(line) for line in lines]
            result = await self._link.run(
                PULL, [*self._fixed, self._bell, *streams], self._worker_id, self._lease_ms, num_jobs, room, *lines
            )
            kind, rest = result[0], result[1:]
            if kind == b"need":
                lines = [*lines[-7:], _text(rest[0])]
                continue
            # Where nothing is said about what comes next, it's likely where something was before.
            self._likely = [_text(line) for line in rest[7:]] or lines[-4:]
            if kind == b"none":
                self._wait_s = (int(rest[0]) or BLOCK_MS) / 1000
                return None
            return _pulled(kind, rest)

    async def wait(self) -> None:
        """Until somebody rings, or what was kept for others is anybody's, or a second has passed."""
        await self._link.blocking.blpop([self._bell, self._keys.doorbell], timeout=self._wait_s)

    async def ring(self) -> None:
        """Let another worker look: a ring that this one took may have been meant for it."""
        await self._link.run(RING, self._fixed)

    async def leave(self) -> None:
        """Take no more: what was kept for this worker is anybody's at once."""
        await self._link.commands.zrem(self._keys.room, self._worker_id)
        await self._link.commands.delete(self._bell)
        await self.ring()

    async def renew(self, holdings: Iterable[Holding]) -> set[RequestId]:
        """Say that this worker is at its jobs; returns those that it has lost."""
        pairs = [part for held in holdings for part in (held.request_id, held.attempt)]
        if not pairs:
            return set()
        lost = await self._link.run(RENEW, self._fixed, self._worker_id, self._lease_ms, *pairs)
        return {RequestId(_text(request_id)) for request_id in lost}

    async def publish(self, gateway_id: GatewayId, outbound: Sequence[Outbound]) -> list[int]:
        """Send to one gateway, one item for each job; returns SENT, STALE or ORPHAN for each."""
        streams: list[str] = []
        arguments: list[Any] = []
        for item in outbound:
            number = 0
            if item.is_terminal:
                streams.append(self._line(item.holding.line))
                number = len(streams)
            held = item.holding
            arguments += [
                held.request_id, held.attempt, item.payload, number, item.cost_tokens, item.output_tokens,
            ]  # fmt: skip
        keys = [*self._fixed, self._link.keys.replies(self._model, gateway_id), *streams]
        return list(await self._link.run(PUBLISH, keys, self._worker_id, *arguments))

    async def release(self, holdings: Sequence[Holding], *, is_delivery: bool) -> int:
        """Hand jobs over, for their gateways to continue them elsewhere; returns how many were still this worker's.

        With `is_delivery` they count as delivered here: one that takes its workers down must not go round for ever.
        """
        if not holdings:
            return 0
        arguments = [part for n, h in enumerate(holdings, 1) for part in (h.request_id, h.attempt, n)]
        streams = [self._line(held.line) for held in holdings]
        return int(await self._link.run(RELEASE, self._fixed + streams, self._worker_id, int(is_delivery), *arguments))

    async def bury(self, job: PulledJob, reason: str, envelope: ReplyEnvelope) -> None:
        """Give a job up that this worker has pulled, and tell whoever may wait for it."""
        assert isinstance(envelope.reply, Failed)
        keys = [
            *self._fixed, self._line(job.line), self._link.keys.dead(self._model),
            self._link.keys.replies(self._model, job.gateway_id),
        ]  # fmt: skip
        await self._link.run(
            BURY, keys, job.request_id, self._worker_id, job.line, job.entry_id, job.gateway_id, reason,
            job.deliveries, job.envelope, encode_replies([envelope]),
        )  # fmt: skip

    async def expired(self, for_ms: int) -> list[ExpiredJob]:
        """Jobs that no worker has renewed, and no gateway continued, for that long after their leases ended."""
        flat = [_text(part) for part in await self._link.run(EXPIRED, self._fixed, for_ms, MAX_EXPIRED, "")]
        return [ExpiredJob(RequestId(flat[at]), GatewayId(flat[at + 1]), flat[at + 2]) for at in range(0, len(flat), 3)]

    async def abandon(self, job: ExpiredJob) -> bool:
        """Forget a job if its gateway is gone."""
        replies = self._link.keys.replies(self._model, job.gateway_id)
        keys = [*self._fixed, self._line(job.line), replies]
        return bool(await self._link.run(ABANDON, keys, job.request_id, "1"))

    async def lines(self) -> list[str]:
        """The streams of all lines."""
        return [self._line(_text(line)) for line in await self._link.commands.smembers(self._keys.lines)]

    def _line(self, line: str) -> str:
        return self._link.keys.line(self._model, line)


def _text(raw: bytes | int) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _pulled(kind: bytes, rest: list[bytes | int]) -> PulledJob:
    request_id, line, entry_id = (_text(part) for part in rest[:3])
    if kind == b"stray":
        return PulledJob(RequestId(request_id), line, entry_id, 0, GatewayId(_text(rest[3])), 1, _bytes(rest[4]))
    gateway_id = GatewayId(_text(rest[4]))
    return PulledJob(RequestId(request_id), line, entry_id, int(rest[3]), gateway_id, int(rest[5]), _bytes(rest[6]))


def _bytes(raw: bytes | int) -> bytes:
    return raw if isinstance(raw, bytes) else b""
