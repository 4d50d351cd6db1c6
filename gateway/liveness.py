"""Ends the waiting of requests that nobody will answer: their worker died, no worker serves their model any more, or their time is up."""

import asyncio

import structlog

from gateway.mailbox import PendingJob
from gateway.model_directory import Fleet
from gateway.redis_link import RedisLink
from gateway.reply_reader import ReplyReader
from gateway.submitter import Submitter
from protocol.replies import Failed

_log = structlog.get_logger(__name__)

UNSERVED_GRACE_S = 10.0
# A worker's first heartbeat may come after its first reply.
LOST_GRACE_S = 1.0
DEADLINE_GRACE_S = 2.0
# A Redis that restarts is waited for; a client isn't kept waiting for one that stays away.
OUTAGE_GRACE_S = 15.0


class Liveness:
    """Looks at all waiting jobs each time that the picture of the fleet is renewed."""

    def __init__(self, link: RedisLink, reader: ReplyReader, submitter: Submitter) -> None:
        self._link = link
        self._reader = reader
        self._submitter = submitter

    def look(self, fleet: Fleet) -> None:
        """Fail what can't be answered."""
        now_s = asyncio.get_running_loop().time()
        for job in self._reader.jobs():
            if job.is_finished or job.entry_id is None:
                continue
            live = fleet.live_workers(job.model)
            is_served = job.worker_id in live if job.worker_id is not None else bool(live)
            if is_served:
                job.unserved_since_s = None
            elif job.unserved_since_s is None:
                job.unserved_since_s = now_s
            self._judge(job, now_s)

    def _judge(self, job: PendingJob, now_s: float) -> None:
        unserved_s = 0.0 if job.unserved_since_s is None else now_s - job.unserved_since_s
        if job.worker_id is not None and unserved_s > LOST_GRACE_S:
            _log.warning("worker_lost", request_id=job.request_id, worker_id=job.worker_id)
            self._end(job, Failed("worker_lost", "the worker that computed this request was lost"), is_gone=True)
        elif job.worker_id is None and unserved_s > UNSERVED_GRACE_S:
            self._end(job, Failed("model_unavailable", "no worker serves this model any more"), is_gone=True)
        elif now_s > job.deadline_s + DEADLINE_GRACE_S:
            self._end(job, Failed("deadline_exceeded", "the request's time limit has passed"), is_gone=False)
        elif self._link.down_s > OUTAGE_GRACE_S:
            self._end(job, Failed("model_unavailable", "the request queue is not reachable"), is_gone=False)
        elif job.mailbox.is_overfull:
            self._end(job, Failed("overloaded", "the answer was not read"), is_gone=False)

    def _end(self, job: PendingJob, failed: Failed, *, is_gone: bool) -> None:
        job.fail(failed)
        self._submitter.withdraw(job, worker_is_gone=is_gone)
