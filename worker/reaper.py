"""Ends the jobs of workers that died: their gateways get an error instead of silence, and nothing stays in Redis.

Any worker may do it for any other of its model. XCLAIM with a minimum idle time lets one of several that try at once win.
"""

import asyncio

import structlog
from redis.exceptions import ResponseError

from protocol.errors import ProtocolError
from protocol.ids import ModelName
from protocol.key_space import JOB_FIELD, REPLIES_FIELD, WORKER_GROUP
from protocol.replies import LAST_SEQUENCE, Failed, ReplyEnvelope, encode_replies
from protocol.scripts import FINISH, LIVE_WORKERS
from protocol.signing import open_job
from worker.consumer import NETWORK_ERRORS
from worker.redis_link import RedisLink
from worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)

REAP_INTERVAL_S = 1.0
_MAX_CLAIMED = 100


class Reaper:
    """Looks for consumers that are no longer alive."""

    def __init__(self, link: RedisLink, model: ModelName, settings: WorkerSettings) -> None:
        self._link = link
        self._settings = settings
        self._jobs_key = link.keys.jobs(model)
        self._workers_key = link.keys.workers(model)
        self._min_idle_ms = int(settings.liveness_ttl_s * 1000)

    async def run(self) -> None:
        """Reap until cancelled."""
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            try:
                await self.reap()
            except ResponseError as error:
                if "NOGROUP" not in str(error) and "no such key" not in str(error):
                    _log.warning("reaping_refused", error=str(error)[:200])
            except NETWORK_ERRORS:
                continue

    async def reap(self) -> None:
        """One look at all consumers."""
        consumers = await self._link.commands.xinfo_consumers(self._jobs_key, WORKER_GROUP)
        live = set(await self._link.commands.eval(LIVE_WORKERS, 1, self._workers_key))
        live.add(self._settings.worker_id.encode())
        for consumer in consumers:
            name = consumer["name"]
            if name in live or consumer["idle"] < self._min_idle_ms:
                continue
            if consumer["pending"]:
                await self._end_jobs(name)
            else:
                await self._link.commands.xgroup_delconsumer(self._jobs_key, WORKER_GROUP, name)

    async def _end_jobs(self, dead: bytes) -> None:
        client = self._link.commands
        pending = await client.xpending_range(self._jobs_key, WORKER_GROUP, "-", "+", _MAX_CLAIMED, consumername=dead)
        ids = [row["message_id"] for row in pending]
        if not ids:
            return
        claimed = await client.xclaim(self._jobs_key, WORKER_GROUP, self._settings.worker_id, self._min_idle_ms, ids)
        for entry_id, fields in claimed:
            await self._end(entry_id, fields or {}, dead)
        # Entries that were deleted while pending can't be claimed, only acknowledged.
        found = {entry_id for entry_id, _ in await client.xrange(self._jobs_key, min=ids[0], max=ids[-1])}
        if lost := [entry_id for entry_id in ids if entry_id not in found]:
            await client.xack(self._jobs_key, WORKER_GROUP, *lost)

    async def _end(self, entry_id: bytes, fields: dict[bytes, bytes], dead: bytes) -> None:
        try:
            job = open_job(self._settings.job_signing_key, fields[JOB_FIELD])
        except (ProtocolError, KeyError) as error:
            _log.error("job_refused", reason=type(error).__name__)
        else:
            _log.warning("job_of_dead_worker", request_id=job.request_id, dead_worker=dead.decode())
            failed = Failed("worker_lost", "the worker that computed this request was lost")
            envelope = ReplyEnvelope(job.request_id, job.attempt, LAST_SEQUENCE, failed)
            payload = {REPLIES_FIELD: encode_replies([envelope])}
            await self._link.commands.xadd(self._link.keys.replies(job.gateway_id), payload, nomkstream=True)
        await self._link.commands.eval(FINISH, 1, self._jobs_key, entry_id)
