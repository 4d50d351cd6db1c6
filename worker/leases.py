"""Renews the leases of this worker's jobs while its engine makes progress, and drops what it has lost.

It runs beside the engine's thread, so that a long prompt doesn't hold it up; a forward pass that hangs ends it.
"""

import asyncio
from collections.abc import Callable

from protocol.ids import RequestId
from worker.engine_thread import EngineThread
from worker.in_flight import InFlight
from worker.job_queue import JobQueue
from worker.redis_link import NETWORK_ERRORS, RedisLink
from worker.settings import WorkerSettings


class LeaseKeeper:
    """Tells Redis which jobs this worker is at. `on_lost` is told each request, attempt and why it isn't."""

    def __init__(
        self, link: RedisLink, queue: JobQueue, engine: EngineThread, in_flight: InFlight, settings: WorkerSettings,
        on_lost: Callable[[RequestId, int, str], None],
    ) -> None:  # fmt: skip
        self._link = link
        self._queue = queue
        self._engine = engine
        self._in_flight = in_flight
        self._settings = settings
        self._on_lost = on_lost

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 5)
            try:
                await self.renew()
            except NETWORK_ERRORS as error:
                self._link.failed(error)

    async def renew(self) -> None:
        """One round; none if the engine is stuck: then its jobs are to go to somebody else."""
        if not self._engine.is_progressing(self._settings.stall_s):
            return
        asked = self._in_flight.holdings()
        lost = await self._queue.renew(asked)
        for held in asked:
            if held.request_id in lost:
                self._on_lost(held.request_id, held.attempt, "taken_over")
