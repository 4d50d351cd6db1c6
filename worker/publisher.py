"""From the engine to the gateways: one write for each gateway with all that's ready. What ends a job acknowledges it in the same step.

Redis refuses what comes from an attempt that isn't the job's present one; the engine is told to drop that request then.
"""

import asyncio
from collections.abc import Callable

from protocol.ids import GatewayId, RequestId
from protocol.replies import Done, Failed, encode_replies
from worker.job_queue import ORPHAN, SENT, Holding, JobQueue, Outbound, cost_tokens
from worker.outgoing import Outgoing
from worker.redis_link import NETWORK_ERRORS, RECONNECT_S, RedisLink


class Publisher:
    """Sends replies in order. `on_sent` is told each batch that left, `on_refused` each request, attempt and why it isn't wanted any more."""

    def __init__(
        self,
        link: RedisLink,
        queue: JobQueue,
        on_sent: Callable[[list[Outgoing]], None],
        on_refused: Callable[[RequestId, int, str], None],
    ) -> None:
        self._link = link
        self._queue = queue
        self._on_sent = on_sent
        self._on_refused = on_refused
        self._ready: asyncio.Queue[list[Outgoing]] = asyncio.Queue()  # bounded by the engine thread's semaphore

    def put(self, replies: list[Outgoing]) -> None:
        """Queue one step's replies; call in the event loop's thread."""
        self._ready.put_nowait(replies)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            steps = [await self._ready.get()]
            while not self._ready.empty():
                steps.append(self._ready.get_nowait())
            await self._publish([reply for step in steps for reply in step])
            for step in steps:
                self._on_sent(step)
                self._ready.task_done()

    async def flush(self) -> None:
        """Until everything put so far has left."""
        await self._ready.join()

    async def _publish(self, replies: list[Outgoing]) -> None:
        """Send until Redis has it. What was sent twice since an answer got lost is told apart by its sequence numbers."""
        by_gateway: dict[GatewayId, list[Outgoing]] = {}
        for reply in replies:
            by_gateway.setdefault(reply.gateway_id, []).append(reply)
        for gateway_id, theirs in by_gateway.items():
            while True:
                try:
                    await self._send(gateway_id, theirs)
                    self._link.answered()
                    break
                except NETWORK_ERRORS as error:
                    self._link.failed(error)
                    await asyncio.sleep(RECONNECT_S)

    async def _send(self, gateway_id: GatewayId, replies: list[Outgoing]) -> None:
        outbound = _by_job(replies)
        verdicts = await self._queue.publish(gateway_id, outbound)
        for item, verdict in zip(outbound, verdicts, strict=True):
            if verdict == SENT or item.is_terminal:
                continue
            reason = "gateway_gone" if verdict == ORPHAN else "taken_over"
            self._on_refused(item.holding.request_id, item.holding.attempt, reason)


def _by_job(replies: list[Outgoing]) -> list[Outbound]:
    """One item for each job. Two attempts of one request may be there, if this worker lost it and got it again."""
    by_job: dict[tuple[RequestId, int], list[Outgoing]] = {}
    for reply in replies:
        by_job.setdefault((reply.envelope.request_id, reply.envelope.attempt), []).append(reply)
    return [_outbound(theirs) for theirs in by_job.values()]


def _outbound(replies: list[Outgoing]) -> Outbound:
    last = replies[-1]
    holding = Holding(last.envelope.request_id, last.envelope.attempt, last.line)
    payload = encode_replies(reply.envelope for reply in replies)
    end = last.envelope.reply
    if isinstance(end, Done):
        cost = cost_tokens(end.prompt_tokens, end.cached_tokens, end.completion_tokens)
        return Outbound(holding, payload, True, cost, end.completion_tokens)
    if isinstance(end, Failed):
        # Not an answer whose length would say something about others.
        return Outbound(holding, payload, True, cost_tokens(last.num_prompt, 0, end.completion_tokens), -1)
    return Outbound(holding, payload)
