"""How often workers ask Redis for work: when they're rung, and once a second when they're idle."""

import asyncio
import time

import pytest

NUM_WORKERS = 4
NUM_SLOTS = 2
NUM_REQUESTS = 80

pytestmark = pytest.mark.timeout(120)


async def _waits(client) -> int:
    """How often workers have begun to wait for a ring; before each time they have asked for work and got none."""
    return (await client.info("commandstats")).get("cmdstat_blpop", {}).get("calls", 0)


async def test_neither_idle_nor_loaded_nor_full_workers_poll(new_arena) -> None:
    """An idle worker looks once a second, a short request costs a look or two, and workers without room ask for nothing while others' jobs wait."""
    async with new_arena(1, NUM_WORKERS, "--decode-rate", "50", "--max-sequences", str(NUM_SLOTS)) as arena:
        client = arena.fleet.client()
        before, started_s = await _waits(client), time.monotonic()
        await asyncio.sleep(3.0)
        idle = await _waits(client) - before
        assert NUM_WORKERS <= idle <= NUM_WORKERS * (time.monotonic() - started_s + 1)

        before, started_s = await _waits(client), time.monotonic()
        requests = iter(range(NUM_REQUESTS))

        async def ask() -> None:
            for number in requests:
                assert (await arena.ask(arena.body(f"Question {number}.", max_tokens=4))).is_complete

        await asyncio.gather(*(ask() for _ in range(NUM_WORKERS)))
        loaded = await _waits(client) - before
        assert loaded <= 3 * NUM_REQUESTS + NUM_WORKERS * (time.monotonic() - started_s + 1)

        long = {"max_tokens": 200, "ignore_eos": True}
        streams = [
            asyncio.create_task(arena.ask(arena.body("Wait.", **long))) for _ in range(3 * NUM_WORKERS * NUM_SLOTS)
        ]
        async with asyncio.timeout(20):
            while sum(s["running_sequences"] for s in await arena.fleet.statuses()) < NUM_WORKERS * NUM_SLOTS:
                await asyncio.sleep(0.05)
        before = await _waits(client)
        await asyncio.sleep(1.5)
        assert before == await _waits(client)
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await client.aclose()
    print(f"idle {idle}, loaded {loaded}")
