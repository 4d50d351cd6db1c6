"""A sub-command's connection to the stack's Redis, or its cluster."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisError

from protocol.redis_url import cluster_node_url
from sluicegate.errors import CommandError

TIMEOUT_S = 5.0

Result = TypeVar("Result")


async def connected(url: str, work: Callable[[Any], Awaitable[Result]]) -> Result:
    """Do something with a client; errors of the client pass through."""
    node_url = cluster_node_url(url)
    kind: Any = Redis if node_url is None else RedisCluster
    client = kind.from_url(node_url or url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    try:
        return await work(client)
    finally:
        await client.aclose()


def run_connected(url: str, work: Callable[[Any], Awaitable[Result]]) -> Result:
    """The same from outside of an event loop; raises CommandError if Redis can't be reached."""
    try:
        return asyncio.run(connected(url, work))
    except (RedisError, OSError, TimeoutError) as error:
        raise CommandError(
            f"cannot reach Redis: {type(error).__name__}: {str(error).rstrip('.')} (start a stack with `sluicegate up`, or name one with --data or --redis-url)"
        ) from None
