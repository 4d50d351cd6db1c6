"""The readers of this process's reply streams, one for each model: they hand replies to the jobs that wait for them.

A stream is made before the first job of its model is submitted and read from its beginning, so that no reply can be missed, and kept alive by
a heartbeat: workers never create it, so a gateway that died takes its streams with it.
"""

import asyncio

import structlog

from gateway.pending_job import PendingJob
from gateway.redis_link import NETWORK_ERRORS, RETRY_S, RedisLink
from gateway.reply_stream import ReplyStream
from protocol.errors import DecodeError
from protocol.ids import GatewayId, ModelName, RequestId
from protocol.replies import decode_replies
from protocol.scripts import OPEN_REPLIES

_log = structlog.get_logger(__name__)

STREAM_TTL_MS = 30_000
HEARTBEAT_S = 2.0


class ReplyReader:
    """Waiting jobs by request, and the tasks that feed them. `interrupted` holds jobs whose replies Redis has lost, until they're continued."""

    def __init__(self, link: RedisLink, gateway_id: GatewayId) -> None:
        self._link = link
        self._gateway_id = gateway_id
        self._jobs: dict[RequestId, PendingJob] = {}
        self._streams: dict[ModelName, ReplyStream] = {}
        self._new_models: asyncio.Queue[ModelName] = asyncio.Queue()
        self.interrupted: set[PendingJob] = set()
        self.is_open = False

    def jobs(self) -> list[PendingJob]:
        """All that wait."""
        return list(self._jobs.values())

    def job(self, request_id: RequestId) -> PendingJob | None:
        """One that waits."""
        return self._jobs.get(request_id)

    def models(self) -> list[ModelName]:
        """Models that jobs were submitted to."""
        return list(self._streams)

    def expect(self, job: PendingJob) -> None:
        """Begin to take a job's replies; call before it's submitted."""
        self._jobs[job.request_id] = job

    def forget(self, job: PendingJob) -> None:
        """Replies of this job are no longer wanted."""
        self._jobs.pop(job.request_id, None)
        self.interrupted.discard(job)

    async def attend(self, model: ModelName) -> None:
        """Make sure that a model's replies are read; call before a job is submitted to it. Raises NETWORK_ERRORS."""
        if model not in self._streams:
            self._streams[model] = ReplyStream(self._link, self._link.keys.replies(model, self._gateway_id))
            self._new_models.put_nowait(model)
        if not self._streams[model].is_open:
            await self._open(model)

    async def keep_open(self) -> None:
        """Renew the streams until cancelled."""
        while True:
            try:
                await self.open()
            except NETWORK_ERRORS as error:
                self._link.failed(error)
            await asyncio.sleep(HEARTBEAT_S if self._link.is_up else RETRY_S)

    async def open(self) -> None:
        """Create or renew all streams; without any, see whether Redis answers."""
        if not self._streams:
            await self._link.commands.ping()
            self._link.answered()
        for model in self.models():
            await self._open(model)
        self.is_open = True

    async def _open(self, model: ModelName) -> None:
        stream = self._streams[model]
        created = await self._link.commands.eval(OPEN_REPLIES, 1, stream.key, STREAM_TTL_MS)
        self._link.answered()
        if created and stream.is_open:
            # Redis came back without its data, or this process was stopped for so long that its stream's time was over.
            stream.begin_anew()
            waiting = [job for job in self.jobs() if job.model == model and job.is_accepted and not job.is_finished]
            _log.error("reply_stream_lost", model=model, waiting_jobs=len(waiting))
            self.interrupted.update(waiting)
        stream.is_open = True

    async def close(self) -> None:
        """Remove the streams; if Redis is away, their time to live does it."""
        try:
            for stream in self._streams.values():
                await stream.close()
                await self._link.commands.delete(stream.key)
        except NETWORK_ERRORS as error:
            self._link.failed(error)

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as readers:
            while True:
                readers.create_task(self._run(await self._new_models.get()))

    async def _run(self, model: ModelName) -> None:
        stream = self._streams[model]
        while True:
            try:
                await self._read(stream)
            except NETWORK_ERRORS as error:
                self._link.failed(error)
                await asyncio.sleep(RETRY_S)

    async def _read(self, stream: ReplyStream) -> None:
        payloads = await stream.read()
        if payloads:
            self._link.answered()
        for payload in payloads:
            self._hand_out(payload)

    def _hand_out(self, payload: bytes) -> None:
        try:
            envelopes = decode_replies(payload)
        except DecodeError as error:
            _log.error("reply_not_understood", reason=str(error))
            return
        now_s = asyncio.get_running_loop().time()
        for envelope in envelopes:
            job = self._jobs.get(envelope.request_id)
            if job is not None:
                job.receive(envelope, now_s)
