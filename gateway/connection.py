"""Clients' connections, where aiohttp's own defaults would be too kind: no more of them than there is room for, a deadline for a request's head
and for taking an answer, and OpenAI's error shape even for what isn't HTTP.
"""

import asyncio
import resource
import secrets
import socket
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from gateway.error_response import error_response, from_http
from gateway.errors import ApiError, crashed
from gateway.metrics import Metrics

_log = structlog.get_logger(__name__)

# Files that the process needs beside its connections: Redis, intake processes, logs.
SPARE_FILES = 128
# After an early refusal the rest of a body is read and dropped for so long, since a reset could cost the client the answer.
LINGER_S = 2.0
MIN_IDLE_S = 0.5
# A connection that is over the limit gets its refusal into the socket's buffer and is closed.
_TOO_MANY = ApiError(503, "Too many connections; try again.", "server_error", "overloaded")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times are in seconds."""

    max_connections: int
    head_timeout_s: float
    idle_timeout_s: float
    slow_reader_s: float


class Connection(RequestHandler):
    """One connection. Idle ones, between requests or before the first, give way to new ones when there are too many."""

    __slots__ = ("_door", "_head_timer")

    def __init__(self, door: "Door", **options: Any) -> None:
        super().__init__(door, **options)
        self._door = door
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received, waits or is answered."""
        is_waiting = self._waiter is None or not self._waiter.done()
        return is_waiting and not self._messages and not self._request_in_progress and self._head_timer is None

    @property
    def has_served(self) -> bool:
        """Whether a request has come over it."""
        return self._request_count > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it if no other gives way."""
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            # What is left in the buffers of a closed connection must not stay for ever because its peer reads nothing.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._door.limits.slow_reader_s * 1000))
        if not self._door.admit(self):
            assert isinstance(transport, asyncio.Transport)
            transport.write(_plain_response(_TOO_MANY))
            self._door.metrics.request("refused", _TOO_MANY.status)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the timer with the connection."""
        self._stop_head_timer()
        self._door.busy(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; a head that has begun must be complete in time."""
        self._door.busy(self)
        super().data_received(data)
        is_waiting = self._waiter is not None and not self._waiter.done()
        if self._messages or not is_waiting:
            self._stop_head_timer()
        elif self._head_timer is None and not self._force_close:
            self._head_timer = self._loop.call_later(self._door.limits.head_timeout_s, self._head_is_late)

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what's left of an answer, within the time that a reader has. aiohttp's own refusals get our shape."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(from_http(resp))
            resp.headers["x-request-id"] = _new_request_id()
        transport = self.transport
        try:
            async with asyncio.timeout(self._door.limits.slow_reader_s):
                finished = await super().finish_response(request, resp, start_time)
            self._door.idle(self)
            return finished
        except TimeoutError:
            _log.warning("slow_reader_cut_off")
            if transport is not None:
                transport.abort()
            return resp, True

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, _: str | None = None
    ) -> web.StreamResponse:
        """What isn't HTTP. The parser's message isn't shown or logged: it quotes the line, which may hold a key."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        error = _parse_error(exc) if status == 400 else crashed()
        _log.info("request_not_understood", status=error.status, reason=type(exc).__name__)
        self._door.metrics.request("malformed", error.status)
        response = error_response(error)
        response.headers["x-request-id"] = _new_request_id()
        response.force_close()
        return response

    def log_exception(self, *_: Any, **kw: Any) -> None:
        """The type alone: an exception's text may hold what a client sent."""
        error = kw.get("exc_info")
        _log.error("connection_crashed", error=type(error).__name__)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._force_close or self._waiter is None or self._waiter.done() or self.transport is None:
            return
        error = ApiError(408, "The request did not arrive in time.", "invalid_request_error", "request_timeout")
        self._door.metrics.request("malformed", error.status)
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(_plain_response(error))
        self.force_close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Door(web.Server):
    """Makes a Connection for each client that comes."""

    def __init__(self, made: web.Server, limits: ConnectionLimits, metrics: Metrics) -> None:
        super().__init__(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation,
            loop=made._loop, **made._kwargs,
        )  # fmt: skip
        self.limits = limits
        self.metrics = metrics
        self._max = min(limits.max_connections, _num_files() - SPARE_FILES)
        # In order of the last answer. One that has never sent a request is no client's yet, and goes first.
        self._fresh: dict[Connection, float] = {}
        self._served: dict[Connection, float] = {}

    def __call__(self) -> RequestHandler:
        """A connection's protocol."""
        return Connection(self, loop=self._loop, **self._kwargs)

    def admit(self, new: Connection) -> bool:
        """Whether there is room for one more; the connection that has been idle for longest makes some."""
        is_full = len(self._connections) > self._max
        found = self._longest_idle() if is_full else None
        if found is not None:
            # At once, not when its task has run: the next newcomer must not choose it again.
            self.busy(found)
            self._connections.pop(found, None)
            found.force_close()
        elif is_full:
            return False
        self.idle(new)
        return True

    def _longest_idle(self) -> Connection | None:
        now_s = self._loop.time()
        for waiting in (self._fresh, self._served):
            for connection, since_s in waiting.items():
                if now_s - since_s < MIN_IDLE_S:
                    break  # it has hardly come, its request may be on the way; all after it are younger
                if connection.is_idle:
                    return connection
        return None

    def idle(self, connection: Connection) -> None:
        """It may be closed to make room. One that has been lost while its answer was sent is not kept."""
        if connection.transport is None:
            return
        (self._served if connection.has_served else self._fresh)[connection] = self._loop.time()

    def busy(self, connection: Connection) -> None:
        """It may not."""
        self._fresh.pop(connection, None)
        self._served.pop(connection, None)


class DoorRunner(web.AppRunner):
    """An AppRunner whose connections are ours."""

    __slots__ = ("_limits", "_metrics")

    def __init__(self, app: web.Application, limits: ConnectionLimits, metrics: Metrics, **options: Any) -> None:
        # Bodies are never decompressed, not even those that are read only to be dropped.
        super().__init__(
            app, handler_cancellation=True, access_log=None, keepalive_timeout=limits.idle_timeout_s,
            lingering_time=LINGER_S, auto_decompress=False, **options,
        )  # fmt: skip
        self._limits = limits
        self._metrics = metrics

    async def _make_server(self) -> web.Server:
        return Door(await super()._make_server(), self._limits, self._metrics)


def raise_file_limit() -> None:
    """As many open files as the system allows this process: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _num_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(soft, SPARE_FILES * 2)


def _new_request_id() -> str:
    return "req_" + secrets.token_hex(12)


def _parse_error(exc: BaseException | None) -> ApiError:
    if isinstance(exc, LineTooLong) or "Too many" in str(exc):
        return ApiError(
            431, "The request's line or headers are too large.", "invalid_request_error", "headers_too_large"
        )
    return ApiError(400, "The request is not valid HTTP/1.1.", "invalid_request_error", "malformed_request")


def _plain_response(error: ApiError) -> bytes:
    """A whole response, for where there is no request to answer."""
    body = error.body()
    reason = {408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    head = (
        f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 2\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
