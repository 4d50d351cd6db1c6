"""How this process speaks to Redis: two clients, since a blocking read must not share time limits with commands."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from protocol.key_space import KeySpace
from protocol.redis_url import cluster_node_url
from worker.errors import RedisSetupError

COMMAND_TIMEOUT_S = 5.0
BLOCK_MS = 1000
BLOCKING_TIMEOUT_S = BLOCK_MS / 1000 + 5.0
RECONNECT_S = 0.5


@dataclass(frozen=True, slots=True)
class RedisLink:
    """`commands` answer within COMMAND_TIMEOUT_S or raise; `blocking` may wait BLOCK_MS for an entry."""

    commands: Any
    blocking: Any
    keys: KeySpace


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
    except (TimeoutError, RedisError, OSError) as error:
        if "unknown command" in str(error).lower() or "no permission" in str(error).lower():
            return  # managed services hide CONFIG
        raise RedisSetupError(f"cannot use Redis: {type(error).__name__}: {error}") from None
    if policy != "noeviction":
        raise RedisSetupError(
            f"Redis has maxmemory-policy {policy}, which may evict waiting jobs; set it to noeviction"
        )
