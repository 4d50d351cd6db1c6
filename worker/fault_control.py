"""Takes orders to damage pages from Redis, one at a time, and reports. Runs only in a worker that was started to allow it."""

import asyncio
from dataclasses import dataclass

import structlog

from protocol.codec import decode, encode
from protocol.errors import DecodeError
from protocol.faults import ORDER_TTL_S, FaultOrder, FaultReport
from protocol.ids import ModelName, WorkerId
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.redis_link import NETWORK_ERRORS, RECONNECT_S, RedisLink

_log = structlog.get_logger(__name__)

# Between looks for an order: nothing that anybody waits for in earnest.
LOOK_S = 0.1


@dataclass(slots=True)
class FaultControl:
    """Obeys. `model` and `worker_id` are this worker's."""

    link: RedisLink
    model: ModelName
    worker_id: WorkerId
    engine: EngineThread

    async def run(self) -> None:
        """Until cancelled."""
        _log.warning(
            "fault_injection_allowed",
            note="this worker damages its own KV cache when told to; never use it for real requests",
        )
        while True:
            try:
                raw = await self.link.commands.lpop(self.link.keys.fault_orders(self.model))
                if raw is not None:
                    await self._obey(raw)
                    continue
                await asyncio.sleep(LOOK_S)
            except NETWORK_ERRORS:
                await asyncio.sleep(RECONNECT_S)

    async def _obey(self, raw: bytes) -> None:
        try:
            order = decode(FaultOrder, raw)
        except DecodeError as error:
            _log.warning("fault_order_refused", error=str(error))
            return
        report = await asyncio.wrap_future(self.engine.call(lambda engine: self._strike(engine, order)))
        _log.warning("fault_injected", kind=order.kind, problem=report.problem, page=report.page, layer=report.layer)
        key = self.link.keys.fault_report(self.model, order.order_id)
        await self.link.commands.set(key, encode(report), px=ORDER_TTL_S * 1000)

    def _strike(self, engine: Engine, order: FaultOrder) -> FaultReport:
        """In the engine's thread, between two steps."""
        from worker.faults import FaultError, inject

        try:
            layer = None if order.layer < 0 else order.layer
            target = inject(engine, order.kind, tenant=order.tenant, layer=layer, place=order.place)
        except FaultError as error:
            return FaultReport(self.worker_id, problem=str(error))
        job = target.sequence.request.job
        return FaultReport(self.worker_id, "", job.request_id, job.tenant, target.page, target.layer)
