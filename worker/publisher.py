"""From the engine to the gateways: one write for each gateway with all that's ready, then the ended jobs' acknowledgement.

Replies leave before their job is acknowledged: a crash in between leaves a job that is pending, which the reaper ends, and a gateway
ignores the second terminal reply.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog
from redis.exceptions import RedisError

from protocol.ids import GatewayId, ModelName, RequestId
from protocol.key_space import REPLIES_FIELD
from protocol.replies import encode_replies
from protocol.scripts import FINISH
from worker.outgoing import Outgoing
from worker.redis_link import RECONNECT_S, RedisLink

_log = structlog.get_logger(__name__)


class Publisher:
    """Sends replies in order. `on_sent` is told each batch that left, `on_orphan` each request whose gateway is gone."""

    def __init__(
        self,
        link: RedisLink,
        model: ModelName,
        on_sent: Callable[[list[Outgoing]], None],
        on_orphan: Callable[[RequestId], None],
    ) -> None:
        self._link = link
        self._jobs_key = link.keys.jobs(model)
        self._on_sent = on_sent
        self._on_orphan = on_orphan
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
        is_waiting = False
        while True:
            try:
                orphans = await self._send(replies)
                break
            except (TimeoutError, RedisError, OSError) as error:
                if not is_waiting:
                    _log.warning("publish_waits_for_redis", error=type(error).__name__)
                    is_waiting = True
                await asyncio.sleep(RECONNECT_S)
        if is_waiting:
            _log.info("publish_goes_on")
        for request_id in orphans:
            self._on_orphan(request_id)

    async def _send(self, replies: list[Outgoing]) -> set[RequestId]:
        by_gateway: dict[GatewayId, list[Outgoing]] = {}
        for reply in replies:
            by_gateway.setdefault(reply.gateway_id, []).append(reply)
        orphans: set[RequestId] = set()
        for gateway_id, theirs in by_gateway.items():
            payload = {REPLIES_FIELD: encode_replies(reply.envelope for reply in theirs)}
            key = self._link.keys.replies(gateway_id)
            if await self._link.commands.xadd(key, payload, nomkstream=True) is None:
                orphans.update(r.envelope.request_id for r in theirs if not r.is_terminal)
        await self._acknowledge(reply.entry_id for reply in replies if reply.is_terminal)
        return orphans - {r.envelope.request_id for r in replies if r.is_terminal}

    async def _acknowledge(self, entry_ids: Iterable[bytes]) -> None:
        ended = list(entry_ids)
        if ended:
            await self._link.commands.eval(FINISH, 1, self._jobs_key, *ended)
