"""Tells the audit stream what the integrity checks found."""

import asyncio
from dataclasses import dataclass

import structlog

from protocol.audit import MAX_AUDIT_ENTRIES, AuditKind, AuditRecord, to_fields
from protocol.ids import ModelName, WorkerId
from worker.engine_thread import EngineThread
from worker.integrity import IntegrityEvent
from worker.redis_link import NETWORK_ERRORS, RECONNECT_S, RedisLink

_log = structlog.get_logger(__name__)

LOOK_S = 0.25
_KINDS: dict[str, AuditKind] = {
    "lease": "integrity.lease", "read": "integrity.seal", "prefix": "integrity.seal", "scrub": "integrity.scrub",
}  # fmt: skip


@dataclass(slots=True)
class AuditWriter:
    """`model` and `worker_id` are this worker's."""

    link: RedisLink
    model: ModelName
    worker_id: WorkerId
    engine: EngineThread

    async def run(self) -> None:
        """Until cancelled. What Redis doesn't take is tried again."""
        while True:
            for event in self.engine.take_events():
                await self._write(event)
            await asyncio.sleep(LOOK_S)

    async def _write(self, event: IntegrityEvent) -> None:
        fields = to_fields(self._record(event))
        while True:
            try:
                await self.link.commands.xadd(self.link.keys.audit, fields, maxlen=MAX_AUDIT_ENTRIES, approximate=True)
                return
            except NETWORK_ERRORS as error:
                self.link.failed(error)
                await asyncio.sleep(RECONNECT_S)

    def _record(self, event: IntegrityEvent) -> AuditRecord:
        return AuditRecord(
            kind=_KINDS[event.kind],
            actor=self.worker_id,
            tenant=event.tenant,
            request=event.request_id or "",
            model=self.model,
            page=event.page if event.page >= 0 else None,
            layer=event.layer if event.layer >= 0 else None,
            detail=event.kind,
        )
