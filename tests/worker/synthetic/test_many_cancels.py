"""How cancellations reach an engine: more of them than it can be told in a long step, and some under a clock that has gone back."""

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


class _Recorder:
    """Stands where the engine's thread does: notes what's cancelled."""

    has_room = True

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


async def test_a_clock_that_went_back_makes_nobody_deaf(valkey_url: str) -> None:
    """The stream was gone for want of cancellations, or with Redis, and is made again with smaller ids: they are heard, each once."""
    engine, keys = _Recorder(), KeySpace("t" + secrets.token_hex(6))
    key = keys.cancels(MODEL)
    async with Redis.from_url(valkey_url, socket_timeout=None) as client:
        watching = asyncio.create_task(watch_cancels(RedisLink(client, client, keys), MODEL, engine))
        try:
            async with asyncio.timeout(20):
                for number, entry_id in enumerate(["99999999999999-5", "*", "*"], 1):
                    if number == 2:
                        await client.delete(key)
                    await client.xadd(key, {"c": f"r{number}"}, id=entry_id)
                    while len(engine.cancelled) < number:
                        assert not watching.done()
                        await asyncio.sleep(0.02)
            await asyncio.sleep(1.5)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.delete(key)
    assert ["r1", "r2", "r3"] == engine.cancelled
