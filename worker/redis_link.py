"""How this process speaks to Redis: two clients, since a blocking read must not share time limits with commands. A change of its state is
logged once, whoever notices it first.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from protocol.key_space import KeySpace
from protocol.link_state import LinkState
from protocol.queue_lua import Script
from protocol.redis_url import cluster_node_url
from worker.errors import RedisSetupError

_log = structlog.get_logger(__name__)

COMMAND_TIMEOUT_S = 5.0
BLOCK_MS = 1000
BLOCKING_TIMEOUT_S = BLOCK_MS / 1000 + 5.0
RECONNECT_S = 0.5

NETWORK_ERRORS = (RedisError, OSError, TimeoutError)


class RedisLink:
    """`commands` answer within COMMAND_TIMEOUT_S or raise; `blocking` may wait BLOCK_MS for an entry."""

    def __init__(self, commands: Any, blocking: Any, keys: KeySpace) -> None:
        self.commands = commands
        self.blocking = blocking
        self.keys = keys
        self._state = LinkState(time.monotonic)
        self._closing: asyncio.Future[Any] | None = None

    async def run(self, script: Script, keys: list[str], *arguments: Any) -> Any:
        """A script's result; one that Redis has forgotten is sent again."""
        try:
            return await self.commands.evalsha(script.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self.commands.eval(script.text, len(keys), *keys, *arguments)

    def failed(self, error: BaseException) -> None:
        """Note that Redis did not do what it was asked."""
        if self._state.failed():
            _log.error("redis_unreachable", error=type(error).__name__, reason=_reason(error))
            # Connections that wait in a pool would each fail a command later, when Redis is long back. A cluster's client sees to its own.
            pools = [client.connection_pool for client in (self.commands, self.blocking) if isinstance(client, Redis)]
            self._closing = asyncio.gather(
                *(pool.disconnect(inuse_connections=False) for pool in pools), return_exceptions=True
            )

    def answered(self) -> None:
        """Note that Redis did."""
        if self._state.answered():
            _log.info("redis_reachable_again")


def _reason(error: BaseException) -> str:
    # What Redis itself says names no values of ours; a client's message may hold the URL.
    return str(error)[:200] if isinstance(error, ResponseError) else ""


@asynccontextmanager
async def open_redis(url: str, key_prefix: str) -> AsyncIterator[RedisLink]:
    """Connect, check that this Redis keeps what it's given, and close at the end. Raises RedisSetupError."""
    commands = _client(url, COMMAND_TIMEOUT_S)
    blocking = _client(url, BLOCKING_TIMEOUT_S)
    try:
        await _check(commands)
        yield RedisLink(commands, blocking, KeySpace(key_prefix))
    finally:
        await commands.aclose()
        await blocking.aclose()


def _client(url: str, timeout_s: float) -> Any:
    node_url = cluster_node_url(url)
    kind: Any = Redis if node_url is None else RedisCluster
    # Our own loops retry, and know which commands may be sent twice.
    never = Retry(NoBackoff(), 0)
    return kind.from_url(
        node_url or url, socket_timeout=timeout_s, socket_connect_timeout=COMMAND_TIMEOUT_S, retry=never
    )


async def _check(client: Any) -> None:
    try:
        policy = (await client.config_get("maxmemory-policy")).get("maxmemory-policy", "noeviction")
    except NETWORK_ERRORS as error:
        if "unknown command" in str(error).lower() or "no permission" in str(error).lower():
            return  # managed services hide CONFIG
        raise RedisSetupError(f"cannot use Redis: {type(error).__name__}: {error}") from None
    if policy != "noeviction":
        raise RedisSetupError(
            f"Redis has maxmemory-policy {policy}, which may evict waiting jobs; set it to noeviction"
        )
