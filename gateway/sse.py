"""Server-sent events: what is ready goes out in one write, a silent stream gets comments, a client that doesn't read is let go."""

import asyncio
import json
from collections.abc import Awaitable, Iterable
from typing import Any

from aiohttp import web

# One newline: a blank line after a comment would be an empty event to some clients.
KEEP_ALIVE = b": ping\n"
# Tokens that follow each other faster are joined: no reader sees the difference, and an event costs more than a token.
MIN_INTERVAL_S = 0.01
DONE = b"data: [DONE]\n\n"
# Made once: `json.dumps` would make one for each event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class SlowReader(ConnectionError):
    """A client took nothing for too long; its connection has been cut."""


def event(value: Any) -> bytes:
    """One event with JSON data. Never NaN, never an id."""
    return b"data: " + _ENCODER.encode(value).encode() + b"\n\n"


class EventStream:
    """A response of server-sent events."""

    def __init__(self, request: web.Request, slow_reader_s: float) -> None:
        self._request = request
        self._slow_reader_s = slow_reader_s
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self.is_open = False
        self._next_write_s = 0.0

    async def wait_turn(self) -> None:
        """Until the next event is due; at once unless the last one has only just left."""
        wait_s = self._next_write_s - asyncio.get_running_loop().time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def open(self) -> None:
        """Send the headers; from here on a failure is an event."""
        self.is_open = True
        await self._response.prepare(self._request)

    async def send(self, events: Iterable[bytes]) -> None:
        """Write events at once; raises SlowReader if the client doesn't take them in time."""
        payload = b"".join(events)
        if not payload:
            return
        self._next_write_s = asyncio.get_running_loop().time() + MIN_INTERVAL_S
        await self._bounded(self._response.write(payload))

    async def end(self) -> web.StreamResponse:
        """A clean end of the body; raises SlowReader if the client doesn't take the rest in time."""
        await self._bounded(self._response.write_eof())
        return self._response

    async def _bounded(self, write: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await write
        except TimeoutError:
            transport = self._request.transport
            if transport is not None:
                transport.abort()
            raise SlowReader from None
