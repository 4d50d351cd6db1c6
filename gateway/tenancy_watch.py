"""Sees changes of tenants, keys and prices within a quarter of a second, keeps Redis' time, and notes when keys were used."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from gateway.redis_link import NETWORK_ERRORS, RedisLink
from gateway.scripts import run_script
from protocol.account_scripts import LOOK

_log = structlog.get_logger(__name__)

POLL_S = 0.25
NOTE_USE_S = 1.0


class TenancyWatch:
    """Polls the revision. `on_change` is called at each change, `on_poll` at each look with the revision seen."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._offset_s = time.time() - time.monotonic()
        self._used: dict[str, int] = {}
        self._noted_s = time.monotonic()
        self.revision = 0
        self.on_change: Callable[[], None] = lambda: None
        self.on_poll: Callable[[int], Awaitable[None]] = _nothing

    def now_ms(self) -> int:
        """Redis' time as far as it's known."""
        return int((time.monotonic() + self._offset_s) * 1000)

    def note_use(self, key_id: str) -> None:
        """A key was used just now; written in a while."""
        self._used[key_id] = self.now_ms()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except NETWORK_ERRORS:
                pass  # whether Redis answers is judged by those who need it for a request
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Look once; errors of Redis pass through."""
        before_s = time.monotonic()
        revision, now_ms = await run_script(self._link.fast, LOOK, [self._link.keys.revision], [])
        self._offset_s = now_ms / 1000 - (before_s + time.monotonic()) / 2
        if revision != self.revision:
            self.revision = revision
            self.on_change()
        await self.on_poll(revision)
        if time.monotonic() - self._noted_s > NOTE_USE_S:
            await self.write_uses()

    async def write_uses(self) -> None:
        """Write when keys were used; errors of Redis pass through."""
        self._noted_s = time.monotonic()
        used, self._used = self._used, {}
        if used:
            await self._link.commands.hset(self._link.keys.last_used, mapping=used)

    async def close(self) -> None:
        """Write what's left."""
        try:
            await self.write_uses()
        except NETWORK_ERRORS:
            _log.warning("key_uses_not_written")


async def _nothing(revision: int) -> None:
    pass
