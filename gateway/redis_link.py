"""How this process speaks to Redis, and whether it answers.

Two clients: `commands` answer within a second or two or raise, `blocking` may wait for an entry. What each request needs goes over `fast`, one connection for all. A caller whose command fails gets an ApiError
at once; the change of state is logged once, in whichever direction.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from gateway.errors import crashed, unavailable
from gateway.redis_lane import Lane
from gateway.scripts import run_script
from protocol.key_space import KeySpace
from protocol.link_state import LinkState
from protocol.queue_lua import Script
from protocol.redis_url import cluster_node_url

_log = structlog.get_logger(__name__)

COMMAND_TIMEOUT_S = 2.0
BLOCK_MS = 1000
BLOCKING_TIMEOUT_S = BLOCK_MS / 1000 + 4.0
RETRY_S = 0.5
MAX_CONNECTIONS = 64
# To each node; a cluster's pool does not wait for a free connection but fails.
MAX_CLUSTER_CONNECTIONS = 1024

NETWORK_ERRORS = (RedisError, OSError, asyncio.TimeoutError)

_MOST_SAID = 120  # characters of a refusal, for the log

T = TypeVar("T")


def _is_refusal(error: BaseException) -> bool:
    """Whether Redis answered that this very command is wrong, which says nothing against Redis. States of a server have names of their own."""
    code = str(error).partition(" ")[0]
    return type(error) is ResponseError and (code == "WRONGTYPE" or not code.isupper())


class _BoundedRedis(Redis):
    """A client with a deadline for each command. Pipelines need one of their own."""

    command_timeout_s = COMMAND_TIMEOUT_S

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with asyncio.timeout(self.command_timeout_s):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class _BoundedCluster(RedisCluster):
    """The same for a cluster."""

    command_timeout_s = COMMAND_TIMEOUT_S

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with asyncio.timeout(self.command_timeout_s):
            return await super().execute_command(*args, **options)


class RedisLink:
    """Clients, key names, and the last known state."""

    def __init__(
        self, commands: Any, blocking: Any, keys: KeySpace, new_lane: Callable[[float], Lane | None] = lambda _: None
    ) -> None:
        self.commands = commands
        self.blocking = blocking
        self._new_lane = new_lane
        # For the scripts that each request needs.
        self.fast: Any = new_lane(COMMAND_TIMEOUT_S) or commands
        self.keys = keys
        self.is_full = False
        self._state = LinkState(time.monotonic)
        self._closing: asyncio.Future[Any] | None = None

    @property
    def is_up(self) -> bool:
        """Whether Redis answers."""
        return self._state.is_up

    async def run(self, script: Script, keys: list[str], *arguments: Any) -> Any:
        """A script's result; one that Redis has forgotten is sent again."""
        return await run_script(self.fast, script.text, keys, list(arguments))

    def new_lane(self) -> Lane | None:
        """A connection of its own for commands that wait, to be closed by the caller; none to a cluster."""
        return self._new_lane(BLOCKING_TIMEOUT_S)

    async def call(self, command: Awaitable[T]) -> T:
        """A command's result; raises ApiError 503 if Redis doesn't give one, 500 if it finds the command wrong."""
        try:
            result = await command
        except OutOfMemoryError:
            if not self.is_full:
                _log.error("redis_out_of_memory")
            self.is_full = True
            raise unavailable("The request queue is out of memory; try again in a moment.", "overloaded", 5) from None
        except NETWORK_ERRORS as error:
            self.failed(error)
            if _is_refusal(error):
                raise crashed() from None
            raise unavailable("The request queue is not reachable; try again in a moment.") from None
        self.answered()
        return result

    def failed(self, error: BaseException) -> None:
        """Note that Redis did not answer, or not as it should."""
        if _is_refusal(error):
            _log.error("redis_refused_command", error=str(error)[:_MOST_SAID])
            return
        if self._state.failed():
            _log.error("redis_unreachable", error=type(error).__name__)
            # Connections that wait in a pool would each fail a command later, when Redis is long back. A cluster's client sees to its own.
            pools = [client.connection_pool for client in (self.commands, self.blocking) if isinstance(client, Redis)]
            self._closing = asyncio.gather(
                *(pool.disconnect(inuse_connections=False) for pool in pools), return_exceptions=True
            )

    @property
    def down_s(self) -> float:
        """For how long Redis has not answered."""
        return 0.0 if self._state.is_up else self._state.for_s

    def has_room(self) -> None:
        """Note that Redis took something new."""
        if self.is_full:
            _log.info("redis_has_room_again")
        self.is_full = False

    @property
    def up_s(self) -> float:
        """For how long Redis has answered since it last did not."""
        return self._state.for_s if self._state.is_up else 0.0

    def answered(self) -> None:
        """Note that Redis did answer."""
        if self._state.answered():
            _log.info("redis_reachable_again")


@asynccontextmanager
async def open_redis(url: str, key_prefix: str) -> AsyncIterator[RedisLink]:
    """Clients that are closed at the end. Nothing is sent yet."""
    commands = _client(url, COMMAND_TIMEOUT_S, MAX_CONNECTIONS)
    blocking = _client(url, BLOCKING_TIMEOUT_S, MAX_CONNECTIONS)
    link = RedisLink(commands, blocking, KeySpace(key_prefix), partial(_lane, commands))
    try:
        yield link
    finally:
        if isinstance(link.fast, Lane):
            await link.fast.aclose()
        await commands.aclose()
        await blocking.aclose()


def _lane(client: Any, timeout_s: float) -> Lane | None:
    """A cluster has several nodes, and redis-py finds the right one."""
    return None if isinstance(client, RedisCluster) else Lane(client.connection_pool.make_connection, timeout_s)


def _client(url: str, timeout_s: float, max_connections: int) -> Any:
    # No automatic retries: a command whose answer got lost may have been carried out, and only the caller knows what that means.
    # And no socket_timeout: under Python 3.11 redis-py then goes through asyncio.wait_for, which loses a cancellation that comes in the tick
    # of the answer. The deadline is set around each command instead.
    client: Any
    if (node_url := cluster_node_url(url)) is not None:
        client = _BoundedCluster.from_url(
            node_url,
            max_connections=MAX_CLUSTER_CONNECTIONS,
            socket_timeout=None,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        client.command_timeout_s = timeout_s
        return client
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=COMMAND_TIMEOUT_S,
        socket_timeout=None,
        socket_connect_timeout=COMMAND_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    client = _BoundedRedis.from_pool(pool)
    client.command_timeout_s = timeout_s
    return client
