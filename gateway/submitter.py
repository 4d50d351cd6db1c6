"""Jobs onto the queue, and back off it."""

import asyncio
import time

import structlog

from gateway.errors import ApiError, overloaded, unavailable
from gateway.mailbox import PendingJob
from gateway.redis_link import NETWORK_ERRORS, RedisLink
from protocol.job import Job
from protocol.scripts import CANCEL, FINISH, SUBMIT
from protocol.signing import seal_job

_log = structlog.get_logger(__name__)

RETRY_AFTER_S = 2


class Submitter:
    """Signs and submits; takes back. Taking back goes on in the background, whatever happens to the request."""

    def __init__(self, link: RedisLink, signing_key: bytes, max_waiting: int) -> None:
        self._link = link
        self._signing_key = signing_key
        self._max_waiting = max_waiting
        self._background: set[asyncio.Task[None]] = set()

    async def submit(self, job: Job, pending: PendingJob) -> None:
        """Put a job on its queue; raises ApiError if it isn't taken. An interruption cannot leave it on the queue unknown."""
        sending = asyncio.ensure_future(self._send(job, pending))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The command is on its way: learn where the job went, then take it back.
            self._in_background(self._withdraw_when_sent(sending, pending))
            raise

    def withdraw(self, pending: PendingJob, *, worker_is_gone: bool = False) -> None:
        """Take an unfinished job back. If its worker is gone nobody else would acknowledge it, so that's done here."""
        self._in_background(self._withdraw(pending, worker_is_gone))

    async def close(self) -> None:
        """Until all that was begun is done."""
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _send(self, job: Job, pending: PendingJob) -> None:
        keys = self._link.keys
        envelope = (
            await asyncio.to_thread(seal_job, self._signing_key, job)
            if _is_large(job)
            else seal_job(self._signing_key, job)
        )
        result = await self._link.call(
            self._link.commands.eval(
                SUBMIT, 2, keys.jobs(job.model), keys.workers(job.model), envelope, self._max_waiting
            )
        )
        if result == b"no_worker":
            raise unavailable("No worker serves this model right now.", "model_unavailable")
        if result == b"full":
            raise overloaded("The queue of this model is full.", RETRY_AFTER_S)
        pending.entry_id = result

    async def _withdraw_when_sent(self, sending: "asyncio.Future[None]", pending: PendingJob) -> None:
        try:
            await sending
        except ApiError:
            return
        await self._withdraw(pending, worker_is_gone=False)

    async def _withdraw(self, pending: PendingJob, worker_is_gone: bool) -> None:
        if pending.entry_id is None:
            return
        keys, client = self._link.keys, self._link.commands
        jobs = keys.jobs(pending.model)
        try:
            await client.eval(CANCEL, 2, jobs, keys.cancels(pending.model), pending.entry_id, pending.request_id)
            if worker_is_gone:
                await client.eval(FINISH, 1, jobs, pending.entry_id)
        except NETWORK_ERRORS as error:
            self._link.failed(error)
            _log.warning("cancel_not_delivered", request_id=pending.request_id)

    def _in_background(self, work: "asyncio.Future[None] | object") -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _is_large(job: Job) -> bool:
    return len(job.prompt_token_ids) > 50_000


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
