"""Jobs onto the queue, on to another worker, and back off it."""

import asyncio
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from gateway.errors import ApiError, overloaded, unavailable
from gateway.pending_job import PendingJob
from gateway.redis_link import NETWORK_ERRORS, RETRY_S, RedisLink
from gateway.routing import MANY_TOKENS, NO_ROUTE, Route, Router
from protocol.ids import GatewayId, ModelName, RequestId
from protocol.job import Job
from protocol.pull_script import HOLD_MS
from protocol.queue_scripts import ABANDON, CANCEL, EXPIRED, LOST, RESUME, RING
from protocol.signing import seal_job
from protocol.submit_script import SUBMIT

_log = structlog.get_logger(__name__)

MAX_RETRY_AFTER_S = 60  # clients of OpenAI's library give up if they are to wait much longer
KEEP_TRYING_S = 120.0
CLOSE_S = 2.0
MAX_EXPIRED = 500
UNBOUNDED = 1 << 50
HOLD_S = HOLD_MS / 1000 + 0.01


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How much may wait, in jobs and in expected weighted tokens."""

    jobs: int
    tokens: int
    tenant_jobs: int
    tenant_tokens: int


class Submitter:
    """Signs and submits, continues, takes back. Taking back goes on in the background, whatever happens to the request."""

    def __init__(self, link: RedisLink, signing_key: bytes, bounds: QueueBounds, router: Router) -> None:
        self._link = link
        self._signing_key = signing_key
        self._bounds = bounds
        self._router = router
        self._background: set[asyncio.Task[None]] = set()

    async def submit(self, pending: PendingJob, weight: float) -> None:
        """Put a job on its queue; raises ApiError if it isn't taken. An interruption cannot leave it on the queue unknown."""
        sending = asyncio.ensure_future(self._submit(pending, weight))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The command is on its way: whether it arrives or not, nothing is left of the job after this.
            self._in_background(self._withdraw_when_sent(sending, pending))
            raise

    async def resume(self, pending: PendingJob, *, force: bool = False) -> bool:
        """Continue a job that no worker is at; with force also if Redis has lost it, or what its worker wrote. False if there's nothing to do.

        Raises NETWORK_ERRORS.
        """
        if pending.finish_if_complete():
            self.withdraw(pending)
            return False
        # An error leaves the proposal as it is: Redis may have taken it, and knows it again when it's repeated.
        job = pending.propose()
        envelope = await self._sealed(job)
        keys = [*self._fixed(job.model), self._line(job)]
        result = await self._link.run(RESUME, keys, job.request_id, pending.job.attempt, envelope, int(force))
        if result == b"gone" and force:
            result = (await self._send(job, envelope, 1.0, force=True))[0]
        now_s = asyncio.get_running_loop().time()
        if result in (b"resumed", b"ok"):
            pending.accept(now_s)
            return True
        pending.reject(now_s)
        return False

    def withdraw(self, pending: PendingJob) -> None:
        """Take an unfinished job back."""
        self._in_background(self._withdraw(pending))

    async def expired(self, model: ModelName, gateway_id: GatewayId) -> list[tuple[RequestId, str]]:
        """A gateway's jobs of a model whose workers haven't been heard of for the time of their leases: request, line. Raises NETWORK_ERRORS."""
        found = await self._link.run(EXPIRED, self._fixed(model), 0, MAX_EXPIRED, gateway_id)
        flat = [part.decode() for part in found]
        return [(RequestId(flat[at]), flat[at + 2]) for at in range(0, len(flat), 3)]

    async def abandon(self, model: ModelName, request_id: RequestId, line: str, gateway_id: GatewayId) -> None:
        """Forget a job of this gateway's that nobody waits for. Raises NETWORK_ERRORS."""
        keys = [
            *self._fixed(model),
            self._link.keys.line(model, line),
            self._link.keys.replies(model, gateway_id),
        ]
        await self._link.run(ABANDON, keys, request_id, "0")

    async def lost(self, model: ModelName, jobs: list[PendingJob]) -> set[RequestId]:
        """Which of a model's jobs Redis doesn't have. Raises NETWORK_ERRORS."""
        keys = [*self._fixed(model), *(self._line(pending.job) for pending in jobs)]
        found = await self._link.run(LOST, keys, *(pending.request_id for pending in jobs))
        return {RequestId(request_id.decode()) for request_id in found}

    async def close(self) -> None:
        """Until all that was begun is done, or the time for it is up."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _submit(self, pending: PendingJob, weight: float) -> None:
        job = pending.job
        envelope, route = await self._sealed(job), await self._router.route(job)
        try:
            result = await self._link.call(self._send(job, envelope, weight, route))
        except ApiError:
            # It may have been carried out all the same, now or when Redis comes back.
            self.withdraw(pending)
            raise
        self._link.has_room()
        if result[0] == b"no_worker":
            raise unavailable("No worker serves this model right now.", "model_unavailable")
        if result[0] == b"full":
            whose = "Your queue" if result[1] == b"tenant" else "The queue"
            wait_s = min(max(math.ceil(result[2] / 1000), 1), MAX_RETRY_AFTER_S)
            raise overloaded(f"{whose} for this model is full.", wait_s)
        pending.is_accepted = True
        loop = asyncio.get_running_loop()
        pending.heard_s = loop.time()
        if route.keys:
            choice = result[2].decode()
            self._router.on_outcome(job.model, choice)
            if choice == "held":
                loop.call_later(HOLD_S, self._offer, pending)

    async def _send(
        self, job: Job, envelope: bytes, weight: float, route: Route = NO_ROUTE, *, force: bool = False
    ) -> Any:
        bounds = self._bounds
        keys = [*self._fixed(job.model), self._line(job), self._link.keys.workers(job.model), *route.keys]
        return await self._link.run(
            SUBMIT, keys, job.request_id, envelope, job.line, job.gateway_id, job.attempt, len(job.prompt_token_ids),
            min(job.max_output_tokens, UNBOUNDED), weight, bounds.jobs, bounds.tokens, bounds.tenant_jobs,
            bounds.tenant_tokens, int(force), *route.arguments,
        )  # fmt: skip

    async def _sealed(self, job: Job) -> bytes:
        if len(job.prompt_token_ids) > MANY_TOKENS:
            return await asyncio.to_thread(seal_job, self._signing_key, job)
        return seal_job(self._signing_key, job)

    def _offer(self, pending: PendingJob) -> None:
        """The worker that a job was kept for has not begun: any other may have it, and should look."""
        if not pending.is_finished and not pending.has_started:
            self._in_background(self._ring(pending.model))

    async def _ring(self, model: ModelName) -> None:
        try:
            await self._link.run(RING, self._fixed(model))
        except NETWORK_ERRORS as error:
            self._link.failed(error)  # workers look once a second all the same

    async def _withdraw_when_sent(self, sending: "asyncio.Future[None]", pending: PendingJob) -> None:
        try:
            await sending
        except ApiError:
            return
        await self._withdraw(pending)

    async def _withdraw(self, pending: PendingJob) -> None:
        """Until Redis knows: it may be away right now, and execute what it was sent before when it comes back."""
        job = pending.job
        keys = [*self._fixed(job.model), self._line(job), self._link.keys.cancels(job.model)]
        end_s = time.monotonic() + KEEP_TRYING_S
        while True:
            try:
                await self._link.run(CANCEL, keys, job.request_id)
                return
            except NETWORK_ERRORS as error:
                self._link.failed(error)
            if time.monotonic() > end_s:
                _log.warning("cancel_not_delivered", request_id=job.request_id)
                return
            await asyncio.sleep(RETRY_S)

    def _fixed(self, model: ModelName) -> list[str]:
        return self._link.keys.queue(model).all()

    def _line(self, job: Job) -> str:
        return self._link.keys.line(job.model, job.line)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
