"""From Redis to the engine: jobs of this worker's model, and cancellations.

A job stays in the consumer group's pending list until its request has ended. The worker takes no more than it can run, so that
the rest of the queue stays free for other workers.
"""

import asyncio
from typing import Any

import structlog
from redis.exceptions import RedisError, ResponseError

from protocol.errors import ProtocolError
from protocol.ids import ModelName, RequestId, WorkerId
from protocol.job import Job
from protocol.key_space import CANCEL_FIELD, JOB_FIELD, WORKER_GROUP
from protocol.scripts import FINISH
from protocol.signing import open_job
from worker.engine_thread import EngineThread
from worker.outgoing import Outgoing
from worker.redis_link import BLOCK_MS, RECONNECT_S, RedisLink

_log = structlog.get_logger(__name__)

NETWORK_ERRORS = (RedisError, OSError, asyncio.TimeoutError)


class InFlight:
    """The jobs that this worker has taken and not yet ended, by request."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._jobs: dict[RequestId, Job] = {}
        self._num_sequences = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._jobs

    def add(self, job: Job) -> None:
        """A job was taken."""
        self._jobs[job.request_id] = job
        self._num_sequences += job.n

    def ended(self, outgoing: Outgoing) -> None:
        """A job's terminal reply has left."""
        job = self._jobs.pop(outgoing.envelope.request_id, None)
        if job is not None:
            self._num_sequences -= job.n
            self._changed.set()

    async def wait_for_room(self) -> None:
        """Until another job may be taken."""
        await self._wait(lambda: self._num_sequences < self._max_sequences)

    async def wait_until_empty(self) -> None:
        """Until all jobs have ended."""
        await self._wait(lambda: not self._jobs)

    async def _wait(self, condition: Any) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


class Consumer:
    """Takes jobs one by one and verifies them."""

    def __init__(
        self, link: RedisLink, model: ModelName, worker_id: WorkerId, signing_key: bytes,
        engine: EngineThread, in_flight: InFlight,
    ) -> None:  # fmt: skip
        self._link = link
        self._model = model
        self._worker_id = worker_id
        self._signing_key = signing_key
        self._engine = engine
        self._in_flight = in_flight
        self._jobs_key = link.keys.jobs(model)

    async def join_group(self) -> None:
        """Make sure that the job stream and its group exist; jobs that wait already are read from the start."""
        try:
            await self._link.commands.xgroup_create(self._jobs_key, WORKER_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def run(self) -> None:
        """Take jobs until cancelled; a Redis that's away or restarted empty is waited for."""
        while True:
            await self._in_flight.wait_for_room()
            try:
                await self._take_one()
            except ResponseError as error:
                if "NOGROUP" not in str(error) and "UNBLOCKED" not in str(error):
                    _log.warning("job_read_refused", error=str(error)[:200])
                    await asyncio.sleep(RECONNECT_S)
                await self._rejoin()
            except NETWORK_ERRORS:
                await asyncio.sleep(RECONNECT_S)

    async def _rejoin(self) -> None:
        try:
            await self.join_group()
        except NETWORK_ERRORS:
            await asyncio.sleep(RECONNECT_S)

    async def _take_one(self) -> None:
        found = await self._link.blocking.xreadgroup(
            WORKER_GROUP, self._worker_id, {self._jobs_key: ">"}, count=1, block=BLOCK_MS
        )
        for entry_id, fields in _entries(found):
            await self._accept(entry_id, fields)

    async def _accept(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            job = open_job(self._signing_key, fields[JOB_FIELD])
        except (ProtocolError, KeyError) as error:
            # Nothing in it can be trusted, not even whom to tell.
            _log.error("job_refused", reason=type(error).__name__)
            await self._forget(entry_id)
            return
        if job.model != self._model or job.request_id in self._in_flight:
            _log.error("job_refused", reason="another model" if job.model != self._model else "second delivery")
            await self._forget(entry_id)
            return
        self._in_flight.add(job)
        self._engine.submit(job, entry_id)

    async def _forget(self, entry_id: bytes) -> None:
        await self._link.commands.eval(FINISH, 1, self._jobs_key, entry_id)


async def watch_cancels(link: RedisLink, model: ModelName, engine: EngineThread) -> None:
    """Pass cancellations on until cancelled. Every worker of a model reads all of them; an unknown one is harmless."""
    key, last = link.keys.cancels(model), b"0"
    while True:
        try:
            found = await link.blocking.xread({key: last}, count=1000, block=BLOCK_MS)
        except NETWORK_ERRORS:
            await asyncio.sleep(RECONNECT_S)
            continue
        for entry_id, fields in _entries(found):
            last = entry_id
            engine.cancel(RequestId(fields.get(CANCEL_FIELD, b"").decode("ascii", "replace")))


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
