"""One connection to Redis on which many scripts are under way at once.

redis-py takes a connection from a pool for each command, writes, waits and gives it back, which costs a gateway more time than the command costs Redis. Here the
commands of one turn of the event loop leave in one write, and answers are handed out in the order of the commands. Connecting,
authentication, packing and parsing stay redis-py's.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, RedisError, ResponseError

_LAST_LOOK = 0.1  # of the time for an answer

_Pack = Callable[[tuple[Any, ...]], bytes]


def _fast_pack() -> _Pack | None:
    """hiredis' own, which redis-py doesn't use for connections of asyncio; it takes an eighth of the time."""
    try:
        pack: _Pack = import_module("hiredis").pack_command
    except (ImportError, AttributeError):
        return None
    return pack


class Lane:
    """Runs scripts as a client's `evalsha` and `eval` do. A broken connection fails what was under way on it; nothing is sent twice.

    A connection on which something waits and nothing has been answered for `timeout_s` is broken. A loop that stood still itself, with answers lying in the socket, isn't taken for that.
    """

    def __init__(self, connect: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None

    async def evalsha(self, sha: str, num_keys: int, *keys_and_arguments: Any) -> Any:
        """A script that Redis knows; raises NoScriptError if it doesn't, and RedisError, OSError or TimeoutError."""
        return await self.execute("EVALSHA", sha, num_keys, *keys_and_arguments)

    async def eval(self, script: str, num_keys: int, *keys_and_arguments: Any) -> Any:
        """A script by its text; raises RedisError, OSError or TimeoutError."""
        return await self.execute("EVAL", script, num_keys, *keys_and_arguments)

    async def execute(self, *parts: Any) -> Any:
        """Any command, by its words, with its answer as Redis gives it; raises RedisError, OSError or TimeoutError."""
        wire = self._wire
        if wire is None or wire.is_broken:
            wire = await self._connected()
        return await wire.put(parts)

    async def aclose(self) -> None:
        """Close the connection; what is under way on it fails."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None:
            self._wire.fail(RedisConnectionError("the connection was closed"))
            await self._wire.close()

    async def _connected(self) -> "_Wire":
        """One attempt at a time, shared by all who wait for it."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._connecting)

    async def _open(self) -> "_Wire":
        if self._wire is not None:
            await self._wire.close()
        connection = self._connect()
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._wire = _Wire(connection, self._timeout_s)
        return self._wire


class _Wire:
    """A connection that is open, and what waits for an answer on it."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._pack = _fast_pack()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._outbox: list[bytes] = []
        self._has_mail = asyncio.Event()
        self._watch: asyncio.TimerHandle | None = None
        self._answered_at_s = self._loop.time()
        self._is_last_look = False
        self.is_broken = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def put(self, parts: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """Send a command with the others of this turn of the loop. Whoever doesn't wait for the answer any more leaves it unread."""
        if self.is_broken:  # between being opened and this
            raise RedisConnectionError("the connection was closed")
        self._outbox += self._packed(parts)  # raises for what can't be sent, before anything is noted
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((answer, self._loop.time()))
        self._has_mail.set()
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._look)
        return answer

    def fail(self, error: BaseException) -> None:
        """The connection is of no use any more."""
        self.is_broken = True
        if self._watch is not None:
            self._watch.cancel()
        waiting, self._waiting = self._waiting, deque()
        for answer, _ in waiting:
            if not answer.done():
                answer.set_exception(error)
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """After `fail`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.disconnect(nowait=True)

    def _packed(self, parts: tuple[Any, ...]) -> list[bytes]:
        if self._pack is None:
            return list(self._connection.pack_command(*parts))
        try:
            return [self._pack(parts)]
        except TypeError as error:
            raise DataError(str(error)) from None

    async def _read(self) -> None:
        read = self._connection.read_response
        try:
            while True:
                try:
                    reply = await read(disable_decoding=True)
                except ResponseError as error:
                    reply = error
                answer, _ = self._waiting.popleft()
                self._answered_at_s = self._loop.time()
                if answer.done():
                    continue  # its caller was cancelled
                if isinstance(reply, ResponseError):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (RedisError, OSError) as error:
            self.fail(error)
        except Exception:
            self.fail(RedisConnectionError("an answer was not understood"))
            raise

    async def _write(self) -> None:
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                outbox, self._outbox = self._outbox, []
                await self._connection.send_packed_command(outbox, check_health=False)
        except (RedisError, OSError) as error:
            self.fail(error)

    def _look(self) -> None:
        """Is the connection silent?"""
        self._watch = None
        if not self._waiting:
            return
        silent_since_s = max(self._waiting[0][1], self._answered_at_s)
        left_s = silent_since_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._is_last_look = False
        elif self._is_last_look:
            self.fail(TimeoutError("Redis did not answer in time"))
            return
        else:  # this process may have been the one that stood still: what has come meanwhile is read first
            self._is_last_look = True
            left_s = self._timeout_s * _LAST_LOOK
        self._watch = self._loop.call_later(left_s, self._look)
