"""Clears up after the dead: jobs whose worker and gateway are both gone, and the names of workers that are no more.

The jobs of a dead worker whose gateway lives are that gateway's business: it continues them. Any worker may do this for any other of its
model; each step is one script, or harmless if two do it.
"""

import asyncio

import structlog
from redis.exceptions import ResponseError

from protocol.ids import ModelName
from protocol.key_space import RETURNED, WORKER_GROUP
from protocol.scripts import LIVE_WORKERS
from worker.job_queue import JobQueue
from worker.redis_link import NETWORK_ERRORS, RedisLink
from worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)

REAP_INTERVAL_S = 1.0
CONSUMERS_EVERY = 30  # rounds
MAX_LINES = 200
MIN_IDLE_MS = 60_000


class Reaper:
    """Looks at leases that ended a while ago, and at consumers that are no longer alive."""

    def __init__(self, link: RedisLink, queue: JobQueue, model: ModelName, settings: WorkerSettings) -> None:
        self._link = link
        self._queue = queue
        self._settings = settings
        self._workers_key = link.keys.workers(model)
        # Gateways continue their jobs within a fraction of a lease.
        self._patience_ms = int(settings.lease_s * 1000)

    async def run(self) -> None:
        """Reap until cancelled."""
        for number in range(1, 1 << 62):
            await asyncio.sleep(REAP_INTERVAL_S)
            try:
                await self.reap()
                if number % CONSUMERS_EVERY == 0:
                    await self.forget_consumers()
            except NETWORK_ERRORS as error:
                self._link.failed(error)

    async def reap(self) -> None:
        """Forget jobs whose worker and gateway are gone."""
        for job in await self._queue.expired(self._patience_ms):
            if await self._queue.abandon(job):
                _log.warning("job_of_dead_gateway_and_worker", request_id=job.request_id)

    async def forget_consumers(self, min_idle_ms: int = MIN_IDLE_MS) -> None:
        """Remove the names of dead workers from lines that are never empty. They hold nothing: that's checked, since removal would lose it."""
        live = set(await self._link.commands.eval(LIVE_WORKERS, 1, self._workers_key))
        live |= {self._settings.worker_id.encode(), RETURNED.encode()}
        for stream in (await self._queue.lines())[:MAX_LINES]:
            try:
                consumers = await self._link.commands.xinfo_consumers(stream, WORKER_GROUP)
            except ResponseError:
                continue  # the line or its group has just gone
            for consumer in consumers:
                is_done = not consumer["pending"] and consumer["idle"] >= min_idle_ms
                if is_done and consumer["name"] not in live:
                    await self._link.commands.xgroup_delconsumer(stream, WORKER_GROUP, consumer["name"])
