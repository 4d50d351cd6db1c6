"""Continues jobs that no worker is at any more, so that their clients see a pause and not an error.

Four things interrupt a job: its worker is dead, stuck or cut off (its lease ends), its worker leaves (it ends the lease itself), Redis has lost
the replies, or Redis has lost the job.
"""

import asyncio

import structlog

from gateway.pending_job import PendingJob
from gateway.redis_link import NETWORK_ERRORS, RedisLink
from gateway.reply_reader import ReplyReader
from gateway.submitter import Submitter
from protocol.ids import GatewayId, ModelName, RequestId

_log = structlog.get_logger(__name__)

LOOK_S = 0.2
# After Redis was away all leases seem to be over: workers get the time to renew them.
TRUST_AFTER_S = 2.5
AUDIT_EVERY = 10  # looks
SILENT_S = 5.0
MAX_AUDITED = 200


class LeaseWatch:
    """One look at all models' leases each fifth of a second, one at silent jobs each two."""

    def __init__(self, link: RedisLink, reader: ReplyReader, submitter: Submitter, gateway_id: GatewayId) -> None:
        self._link = link
        self._reader = reader
        self._submitter = submitter
        self._gateway_id = gateway_id
        self._suspects: set[RequestId] = set()

    async def run(self) -> None:
        """Watch until cancelled."""
        for number in range(1, 1 << 62):
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
                if number % AUDIT_EVERY == 0:
                    await self._audit()
            except NETWORK_ERRORS as error:
                self._link.failed(error)

    async def _look(self) -> None:
        for job in list(self._reader.interrupted):
            await self._continue(job, "replies_lost", force=True)
            self._reader.interrupted.discard(job)
        for job in self._reader.jobs():
            if job.proposal is not None:
                await self._continue(job, "unanswered")
        if self._link.up_s < TRUST_AFTER_S:
            return
        for model in self._reader.models():
            for request_id, line in await self._submitter.expired(model, self._gateway_id):
                await self._take_care(model, request_id, line)

    async def _take_care(self, model: ModelName, request_id: RequestId, line: str) -> None:
        job = self._reader.job(request_id)
        if job is None or job.is_finished:
            await self._submitter.abandon(model, request_id, line, self._gateway_id)
        else:
            await self._continue(job, "worker_lost")

    async def _audit(self) -> None:
        """Jobs of which nothing was heard for a while: does Redis still have them? One that is missed twice in a row is submitted anew."""
        now_s = asyncio.get_running_loop().time()
        silent: dict[ModelName, list[PendingJob]] = {}
        for job in self._reader.jobs():
            if job.is_accepted and not job.is_finished and now_s - job.heard_s > SILENT_S:
                silent.setdefault(job.model, []).append(job)
        suspects: set[RequestId] = set()
        for model, jobs in silent.items():
            audited = sorted(jobs, key=lambda job: job.heard_s)[:MAX_AUDITED]
            lost = await self._submitter.lost(model, audited)
            for job in audited:
                if job.request_id in lost & self._suspects:
                    await self._continue(job, "job_lost", force=True)
                elif job.request_id in lost:
                    suspects.add(job.request_id)
        self._suspects = suspects

    async def _continue(self, job: PendingJob, reason: str, *, force: bool = False) -> None:
        if not self._is_wanted(job):
            return
        worker_id = job.worker_id
        try:
            is_continued = await self._submitter.resume(job, force=force)
        finally:
            # Whoever waited may have left meanwhile, and the job been taken back before it was there again.
            if not self._is_wanted(job):
                self._submitter.withdraw(job)
        if is_continued and self._is_wanted(job):
            _log.warning(
                "request_continues", request_id=job.request_id, reason=reason, attempt=job.job.attempt,
                worker_id=worker_id, tokens=job.completion_tokens,
            )  # fmt: skip

    def _is_wanted(self, job: PendingJob) -> bool:
        return not job.is_finished and self._reader.job(job.request_id) is job
