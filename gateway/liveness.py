"""Ends the waiting of requests that nobody will answer: no worker serves their model any more, or their time is up.

A worker that dies ends nothing: `lease_watch` continues its jobs elsewhere.
"""

import asyncio

from gateway.model_directory import Fleet
from gateway.pending_job import PendingJob
from gateway.redis_link import RedisLink
from gateway.reply_reader import ReplyReader
from gateway.submitter import Submitter
from protocol.replies import Failed

# A worker that's started anew has to load its model first.
UNSERVED_GRACE_S = 60.0
DEADLINE_GRACE_S = 2.0
# A Redis that restarts is waited for; a client isn't kept waiting for one that stays away.
OUTAGE_GRACE_S = 45.0


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
            if job.is_finished or not job.is_accepted:
                continue
            if fleet.live_workers(job.model):
                job.unserved_since_s = None
            elif job.unserved_since_s is None:
                job.unserved_since_s = now_s
            self._judge(job, now_s)

    def _judge(self, job: PendingJob, now_s: float) -> None:
        if job.unserved_since_s is not None and now_s - job.unserved_since_s > UNSERVED_GRACE_S:
            self._end(job, Failed("model_unavailable", "no worker serves this model any more"))
        elif now_s > job.deadline_s + DEADLINE_GRACE_S:
            self._end(job, Failed("deadline_exceeded", "the request's time limit has passed"))
        elif self._link.down_s > OUTAGE_GRACE_S:
            self._end(job, Failed("model_unavailable", "the request queue is not reachable"))
        elif job.mailbox.is_overfull:
            self._end(job, Failed("overloaded", "the answer was not read"))

    def _end(self, job: PendingJob, failed: Failed) -> None:
        job.fail(failed)
        self._submitter.withdraw(job)
