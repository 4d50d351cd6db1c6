"""A worker's side of the queue, beside the scripts themselves (tests/protocol)."""

import secrets

from redis.asyncio import Redis

from protocol.key_space import KeySpace
from worker.job_queue import JobQueue
from worker.redis_link import RedisLink


async def test_a_worker_that_leaves_leaves_nothing_for_good(valkey_url: str) -> None:
    """The last one rings for nobody: its ring has a time to live, as have all keys of a queue; and many rings are not many items."""
    keys = KeySpace("t" + secrets.token_hex(6))
    async with Redis.from_url(valkey_url) as client:
        queue = JobQueue(RedisLink(client, client, keys), "m/1", "w1", 60_000)
        assert await queue.pull(0, 4) is None
        for _ in range(200):
            await queue.ring()
        await queue.leave()
        left = {key: await client.ttl(key) for key in await client.keys(f"{keys.prefix}:*")}
        assert {keys.queue("m/1").doorbell.encode()} == set(left)
        assert all(0 < seconds <= 60 for seconds in left.values())
        assert await client.llen(keys.queue("m/1").doorbell) <= 128
        await client.delete(*left)
