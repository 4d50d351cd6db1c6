"""From Redis to the engine: jobs of this worker's model, and cancellations.

A job stays in the pending list of its line until its request has ended. The worker takes no more than it can run, so that
the rest of the queue stays free for other workers.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from protocol.errors import DecodeError, ProtocolError, SignatureError
from protocol.ids import ModelName, RequestId, TenantId
from protocol.job import Job
from protocol.key_space import CANCEL_FIELD, FORGET_FIELD
from protocol.replies import LAST_SEQUENCE, Failed, ReplyEnvelope
from protocol.signing import open_job
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.in_flight import InFlight
from worker.job_queue import JobQueue, PulledJob
from worker.redis_link import BLOCK_MS, NETWORK_ERRORS, RECONNECT_S, RedisLink

_log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 0.1


class Consumer:
    """Takes jobs one by one and verifies them. A job that was given to `max_deliveries` workers and ended none of them is given up."""

    def __init__(
        self, link: RedisLink, queue: JobQueue, model: ModelName, signing_key: bytes, max_deliveries: int,
        engine: EngineThread, in_flight: InFlight, on_session: Callable[[bytes], None] = lambda digest: None,
        is_progressing: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._link = link
        self._queue = queue
        self._model = model
        self._signing_key = signing_key
        self._max_deliveries = max_deliveries
        self._engine = engine
        self._in_flight = in_flight
        self._on_session = on_session
        self._is_progressing = is_progressing
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Take no more. What is just being taken is: a job must not be lost between Redis and here."""
        self._stopping.set()

    async def run(self) -> None:
        """Take jobs until stopped; a Redis that's away or restarted empty is waited for."""
        while not self._stopping.is_set():
            await self._unless_stopping(self._in_flight.wait_for_room())
            if not self._is_progressing():
                await self._unless_stopping(self._wait_for_progress())
            if self._stopping.is_set():
                return
            try:
                await self._take_one()
            except NETWORK_ERRORS as error:
                self._link.failed(error)
                await self._unless_stopping(asyncio.sleep(RECONNECT_S))

    async def _wait_for_progress(self) -> None:
        """While a step hangs nothing is taken: what this worker has lost would come back to it until it's given up as poisonous."""
        while not self._is_progressing():
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _take_one(self) -> None:
        pulled = await self._queue.pull(len(self._in_flight), self._in_flight.room)
        self._link.answered()
        if pulled is not None:
            await self._accept(pulled)
            return
        await self._unless_stopping(self._queue.wait())
        if self._stopping.is_set():
            await self._queue.ring()

    async def _accept(self, pulled: PulledJob) -> None:
        job, problem = self._opened(pulled)
        if job is None:
            _log.error("job_refused", reason=problem, line=pulled.line, deliveries=pulled.deliveries)
            failed = Failed("internal_error", "the request was damaged in the queue")
            await self._bury(pulled, problem, failed)
            return
        if pulled.deliveries > self._max_deliveries:
            _log.error("job_given_up", request_id=job.request_id, tenant=job.tenant, deliveries=pulled.deliveries)
            message = f"the request was given up: {self._max_deliveries} workers were lost while they computed it"
            await self._bury(pulled, "poisonous", Failed("worker_lost", message))
            return
        if (earlier := self._in_flight.add(job)) is not None:
            # This worker lost it, and gets it again before it has noticed.
            self._engine.drop(earlier.request_id, earlier.attempt)
        if job.session is not None:
            self._on_session(job.session)
        self._engine.submit(job)

    def _opened(self, pulled: PulledJob) -> tuple[Job | None, str]:
        """The job, or None and why it isn't one that a gateway has put there."""
        try:
            job = open_job(self._signing_key, pulled.envelope)
        except SignatureError:
            return None, "signature"
        except DecodeError:
            return None, "malformed"
        except ProtocolError:
            return None, "protocol"
        place = (job.model, job.request_id, job.line, job.attempt, job.gateway_id)
        if place != (self._model, pulled.request_id, pulled.line, pulled.attempt, pulled.gateway_id):
            return None, "misplaced"
        return job, ""

    async def _bury(self, pulled: PulledJob, reason: str, failed: Failed) -> None:
        envelope = ReplyEnvelope(pulled.request_id, max(pulled.attempt, 1), LAST_SEQUENCE, failed)
        await self._queue.bury(pulled, reason, envelope)

    async def _unless_stopping(self, work: Coroutine[Any, Any, Any]) -> None:
        """Await something that may be left undone when the worker stops."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]


async def watch_cancels(link: RedisLink, model: ModelName, engine: EngineThread) -> None:
    """Pass cancellations on until cancelled. Every worker of a model reads all of them; an unknown one is harmless."""
    key, last = link.keys.cancels(model), b"0"
    while True:
        try:
            found = await link.blocking.xread({key: last}, count=1000, block=BLOCK_MS)
            if not found:
                last = await _place(link, key, last)
        except NETWORK_ERRORS as error:
            link.failed(error)
            await asyncio.sleep(RECONNECT_S)
            continue
        for entry_id, fields in _entries(found):
            while not engine.has_room:  # a step takes long, and all gateways' clients leave
                await asyncio.sleep(LOOK_AGAIN_S)
            last = entry_id
            if FORGET_FIELD in fields:
                tenant = TenantId(fields[FORGET_FIELD].decode("utf-8", "replace"))
                engine.call(partial(Engine.forget, tenant=tenant))
                _log.info("tenant_forgotten", tenant=tenant)
            else:
                engine.cancel(RequestId(fields.get(CANCEL_FIELD, b"").decode("ascii", "replace")))


async def _place(link: RedisLink, key: str, last: bytes) -> bytes:
    """Where to read on: at the beginning if the stream was made anew under a clock that has gone back, so that all of it would look old."""
    newest = await link.commands.xrevrange(key, count=1)
    return b"0" if newest and _moment(newest[0][0]) < _moment(last) else last


def _moment(entry_id: bytes) -> tuple[int, int]:
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number or 0)


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of a read of one stream, in either protocol's shape; a deleted entry has no fields."""
    if not found:
        return []
    streams = found.values() if isinstance(found, dict) else [entries for _, entries in found]
    flat: list[tuple[bytes, dict[bytes, bytes]]] = []
    for entries in streams:
        # RESP3 wraps a stream's entries once more.
        rows = entries[0] if entries and isinstance(entries[0], list) else entries
        flat.extend((entry_id, fields or {}) for entry_id, fields in rows)
    return flat
