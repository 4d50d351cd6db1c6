"""More cancellations than an engine in a long step can be told: they wait in Redis, and the worker lives on."""

import asyncio
import secrets
from dataclasses import replace

from redis.asyncio import Redis

from protocol.ids import ModelName
from protocol.key_space import KeySpace
from protocol.replies import Failed
from worker.consumer import watch_cancels
from worker.engine_thread import MAX_COMMANDS, EngineThread
from worker.outgoing import Outgoing
from worker.redis_link import RedisLink

MODEL = ModelName("m/1")


async def test_a_flood_of_cancellations_waits_for_a_long_step(lab, valkey_url: str) -> None:
    """The engine stands still while all clients of a large fleet leave: nothing breaks, jobs still come in, and the last cancellation counts too."""
    replies: list[Outgoing] = []

    def deliver(step: list[Outgoing]) -> None:
        replies.extend(step)
        thread.published()

    thread = EngineThread(lab.engine(), deliver)
    job = replace(lab.job(max_tokens=4000, ignore_eos=True), model=MODEL)
    keys = KeySpace("t" + secrets.token_hex(6))
    async with Redis.from_url(valkey_url, socket_timeout=None) as client:
        async with client.pipeline(transaction=False) as pipeline:
            for number in range(MAX_COMMANDS + 2000):
                pipeline.xadd(keys.cancels(MODEL), {"c": f"somebody-{number}"})
            pipeline.xadd(keys.cancels(MODEL), {"c": job.request_id})
            await pipeline.execute()
        watching = asyncio.create_task(watch_cancels(RedisLink(client, client, keys), MODEL, thread))
        try:
            while thread.has_room:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            assert not watching.done()
            thread.submit(job)
            thread.start()
            async with asyncio.timeout(20):
                while not any(isinstance(reply.envelope.reply, Failed) for reply in replies):
                    assert not watching.done()
                    await asyncio.sleep(0.01)
        finally:
            thread.stop(5)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.delete(keys.cancels(MODEL))
    assert "cancelled" == replies[-1].envelope.reply.code
