"""The one reader of this process's reply stream: hands replies to the jobs that wait for them.

The stream is made before the first job is submitted and read from its beginning, so that no reply can be missed, and kept alive by a
heartbeat: workers never create it, so a gateway that died takes its stream with it.
"""

import asyncio
from typing import Any

import structlog
from redis.exceptions import ResponseError

from gateway.mailbox import PendingJob
from gateway.redis_link import BLOCK_MS, NETWORK_ERRORS, RETRY_S, RedisLink
from protocol.errors import DecodeError
from protocol.ids import GatewayId, RequestId
from protocol.key_space import REPLIES_FIELD
from protocol.replies import Failed, decode_replies
from protocol.scripts import OPEN_REPLIES

_log = structlog.get_logger(__name__)

STREAM_TTL_MS = 30_000
HEARTBEAT_S = 2.0
MAX_ENTRIES = 200


class ReplyReader:
    """Waiting jobs by request, and the task that feeds them."""

    def __init__(self, link: RedisLink, gateway_id: GatewayId) -> None:
        self._link = link
        self._key = link.keys.replies(gateway_id)
        self._jobs: dict[RequestId, PendingJob] = {}
        self._last_id = b"0"
        self.is_open = False

    def jobs(self) -> list[PendingJob]:
        """All that wait."""
        return list(self._jobs.values())

    def expect(self, job: PendingJob) -> None:
        """Begin to take a job's replies; call before it's submitted."""
        self._jobs[job.request_id] = job

    def forget(self, job: PendingJob) -> None:
        """Replies of this job are no longer wanted."""
        self._jobs.pop(job.request_id, None)

    async def keep_open(self) -> None:
        """Create the stream, and renew it until cancelled."""
        while True:
            try:
                await self.open()
            except NETWORK_ERRORS as error:
                self._link.failed(error)
            await asyncio.sleep(HEARTBEAT_S if self._link.is_up else RETRY_S)

    async def open(self) -> None:
        """Create or renew the stream. If it had to be created again, Redis has lost it, and the waiting jobs with it."""
        created = await self._link.commands.eval(OPEN_REPLIES, 1, self._key, STREAM_TTL_MS)
        self._link.answered()
        if created and self.is_open:
            _log.error("reply_stream_lost", waiting_jobs=len(self._jobs))
            self._last_id = b"0"
            for job in self.jobs():
                job.fail(Failed("model_unavailable", "the request queue lost its data; send the request again"))
        self.is_open = True

    async def close(self) -> None:
        """Remove the stream; if Redis is away, its time to live does it."""
        try:
            await self._link.commands.delete(self._key)
        except NETWORK_ERRORS as error:
            self._link.failed(error)

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._read()
            except ResponseError as error:
                _log.warning("reply_read_refused", error=str(error)[:200])
                await asyncio.sleep(RETRY_S)
            except NETWORK_ERRORS as error:
                self._link.failed(error)
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        found = await self._link.blocking.xread({self._key: self._last_id}, count=MAX_ENTRIES, block=BLOCK_MS)
        entries = _entries(found)
        if not entries:
            return
        self._link.answered()
        for entry_id, fields in entries:
            self._last_id = entry_id
            self._hand_out(fields.get(REPLIES_FIELD, b""))
        await self._link.commands.xdel(self._key, *(entry_id for entry_id, _ in entries))

    def _hand_out(self, payload: bytes) -> None:
        try:
            envelopes = decode_replies(payload)
        except DecodeError as error:
            _log.error("reply_not_understood", reason=str(error))
            return
        for envelope in envelopes:
            job = self._jobs.get(envelope.request_id)
            if job is not None:
                job.receive(envelope)


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of a read of one stream, in either protocol's shape."""
    if not found:
        return []
    streams = found.values() if isinstance(found, dict) else [entries for _, entries in found]
    flat: list[tuple[bytes, dict[bytes, bytes]]] = []
    for entries in streams:
        # RESP3 wraps a stream's entries once more.
        flat.extend(entries[0] if entries and isinstance(entries[0], list) else entries)
    return flat
