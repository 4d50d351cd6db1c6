"""Tells gateways, through Redis, what this worker has in its cache: the moment that it changes, but no more than a few times a second."""

import asyncio

import structlog

from protocol.ids import ModelName, WorkerId
from protocol.scripts import HOLD_PREFIXES
from worker.cache.held_prefixes import HeldPrefixes
from worker.redis_link import NETWORK_ERRORS, RECONNECT_S, RedisLink

_log = structlog.get_logger(__name__)

MIN_INTERVAL_S = 0.1
RENEW_S = 10.0
TTL_MS = 30_000


class PrefixPublisher:
    """Writes changes; all of it at first, and whenever Redis doesn't have it any more."""

    def __init__(self, link: RedisLink, model: ModelName, worker_id: WorkerId, held: HeldPrefixes) -> None:
        self._link = link
        self._key = link.keys.held(model, worker_id)
        self._held = held
        self._is_written = False
        self._has_news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        held.on_change = self._wake

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            try:
                await self._write()
            except NETWORK_ERRORS as error:
                self._link.failed(error)
                self._is_written = False
                await asyncio.sleep(RECONNECT_S)
                continue
            await asyncio.sleep(MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._has_news.wait()
            except TimeoutError:
                pass

    async def _write(self) -> None:
        self._has_news.clear()
        changes = self._held.take_changes(is_whole=not self._is_written)
        self._is_written = True
        was_there = await self._link.run(
            HOLD_PREFIXES, [self._key], TTL_MS, int(changes.is_whole), len(changes.added), *changes.added, *changes.gone
        )
        if not was_there:
            self._is_written = False
            await self._write()

    async def leave(self) -> None:
        """Take everything back. Errors of the client pass through."""
        await self._link.commands.delete(self._key)

    def _wake(self) -> None:
        """Called in any thread."""
        self._loop.call_soon_threadsafe(self._has_news.set)
