"""What can happen to Redis under a running fleet: streams pause and go on word for word, each process says it once, and within seconds all is as before."""

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

RATES = ("--decode-rate", "40")
NUM_STREAMS = 6
RECOVERY_S = 5.0
SILENT_S = 30.0
LONG = {"max_tokens": 150, "ignore_eos": True}  # some four seconds

pytestmark = pytest.mark.timeout(240)


async def _status(arena, path: str) -> int:
    async with arena.session.get(arena.fleet.gateways[0].url + path) as response:
        return response.status


async def _until(condition, timeout_s: float) -> float:
    """Seconds that it took."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while not await condition():
        assert loop.time() - started_s < timeout_s, "it did not come true in time"
        await asyncio.sleep(0.05)
    return loop.time() - started_s


async def _recovered(arena, key: str = "") -> float:
    """Seconds until readiness is on and a request is answered."""

    async def answers() -> bool:
        return (await arena.ask(arena.body("Is anybody there?", max_tokens=1), key=key)).is_complete

    seconds = await _until(lambda: _is(arena, "/health/ready", 200), 20)
    return seconds + await _until(answers, 20)


async def _is(arena, path: str, status: int) -> bool:
    return await _status(arena, path) == status


async def _streams(arena) -> tuple[list[asyncio.Task], list]:
    """Streams that have begun, and what each is to be."""
    bodies = [arena.body(f"Question {number}.", **LONG) for number in range(NUM_STREAMS)]
    expected = list(await asyncio.gather(*(arena.ask(body) for body in bodies)))
    assert all(outcome.is_complete and outcome.completion_tokens == LONG["max_tokens"] for outcome in expected)
    streams = [asyncio.create_task(arena.ask(body)) for body in bodies]
    await _until(lambda: _all_run(arena), 20)
    await asyncio.sleep(0.5)
    return streams, expected


async def _all_run(arena) -> bool:
    return sum(status["running_sequences"] for status in await arena.fleet.statuses()) == NUM_STREAMS


def _said(arena, word: str) -> dict[str, int]:
    """How often each gateway and worker said it."""
    children = [*(gateway.child for gateway in arena.fleet.gateways), *arena.fleet.workers]
    return {child.name: Path(child.log).read_text().count(word) for child in children}


async def _check_idle(arena) -> None:
    """Nothing is in the queue or in a worker's hands."""

    async def is_idle() -> bool:
        statuses = await arena.fleet.statuses()
        client = arena.fleet.client()
        try:
            live = await client.exists("sg:{synthetic}:live")
        finally:
            await client.aclose()
        held = sum(status["pages_total"] - status["pages_free"] - status["pages_cached"] for status in statuses)
        return not live and not held and not any(status["running_sequences"] for status in statuses)

    await _until(is_idle, 10)


@pytest.mark.parametrize("kind", ["empty", "with its data"])
async def test_redis_is_restarted(new_arena, kind: str) -> None:
    """Killed and started again, with what it had written or without anything: readiness goes, liveness stays, streams go on."""
    async with new_arena(1, 2, *RATES) as arena:
        streams, expected = await _streams(arena)
        arena.fleet.kill(arena.fleet.redis)
        await arena.fleet.redis.wait()
        await _until(lambda: _is(arena, "/health/ready", 503), 5)
        assert 200 == await _status(arena, "/health/live")
        assert 503 == (await arena.ask(arena.body("Now?"))).status
        await asyncio.sleep(1.0)
        if kind == "empty":
            shutil.rmtree(arena.fleet.folder / "redis")
            (arena.fleet.folder / "redis").mkdir()
        await arena.restart_redis()
        await _until(lambda: _is(arena, "/health/ready", 200), 20)
        key = await arena.fleet.new_key("acme") if kind == "empty" else ""
        assert await _recovered(arena, key) < RECOVERY_S
        assert expected == list(await asyncio.gather(*streams))
        await _check_idle(arena)
        for word in ("redis_unreachable", "redis_reachable_again"):
            assert {1} == set(_said(arena, word).values()), (word, _said(arena, word))


async def test_redis_is_silent_for_half_a_minute(new_arena) -> None:
    """SIGSTOP: requests are refused in time, open streams wait, and go on when it answers."""
    async with new_arena(1, 2, *RATES) as arena:
        streams, expected = await _streams(arena)
        arena.fleet.kill(arena.fleet.redis, signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        stopped_s = loop.time()
        await _until(lambda: _is(arena, "/health/ready", 503), 8)
        asked_s = loop.time()
        assert 503 == (await arena.ask(arena.body("Now?"))).status
        assert loop.time() - asked_s < 5.0
        while loop.time() - stopped_s < SILENT_S:
            assert 200 == await _status(arena, "/health/live")
            await asyncio.sleep(1.0)
        arena.fleet.kill(arena.fleet.redis, signal.SIGCONT)
        assert await _recovered(arena) < RECOVERY_S
        assert expected == list(await asyncio.gather(*streams))
        await _check_idle(arena)
        for word in ("redis_unreachable", "redis_reachable_again"):
            assert {1} == set(_said(arena, word).values()), (word, _said(arena, word))


async def test_redis_is_full(new_arena) -> None:
    """At maxmemory new requests are refused with a time to wait, running ones end as ever, even if their worker dies; then there's room again."""
    async with new_arena(1, 2, *RATES) as arena:
        streams, expected = await _streams(arena)
        client = arena.fleet.client()
        await client.config_set("maxmemory", 1)
        refused = [await arena.ask(arena.body("Now?")) for _ in range(3)]
        assert [503] * 3 == [outcome.status for outcome in refused]
        assert (200, 200) == (await _status(arena, "/health/live"), await _status(arena, "/health/ready"))
        await arena.kill_worker()
        assert expected == list(await asyncio.gather(*streams))
        await client.config_set("maxmemory", 0)
        await client.aclose()
        assert await _recovered(arena) < RECOVERY_S
        await _check_idle(arena)
        gateway = arena.fleet.gateways[0].child.name
        for word in ("redis_out_of_memory", "redis_has_room_again"):
            assert 1 == _said(arena, word)[gateway]
        assert {0} == set(_said(arena, "redis_unreachable").values())


@pytest.mark.parametrize("what", ["scripts", "groups"])
async def test_redis_forgets(new_arena, what: str) -> None:
    """SCRIPT FLUSH and XGROUP DESTROY, again and again, while streams run, requests come and a worker dies: nobody notices."""
    async with new_arena(1, 2, *RATES) as arena:
        streams, expected = await _streams(arena)
        is_over = asyncio.Event()

        async def forget() -> None:
            client = arena.fleet.client()
            while not is_over.is_set():
                if what == "scripts":
                    await client.script_flush()
                else:
                    async for line in client.scan_iter("sg:{synthetic}:line:*"):
                        await client.xgroup_destroy(line, "workers")
                await asyncio.sleep(0.02)
            await client.aclose()

        forgetting = asyncio.create_task(forget())
        try:
            await arena.kill_worker()
            assert expected == list(await asyncio.gather(*streams))
            again = await asyncio.gather(*(arena.ask(arena.body(f"Question {n}.", **LONG)) for n in range(NUM_STREAMS)))
            assert expected == list(again)
        finally:
            is_over.set()
            await forgetting
        assert await _recovered(arena) < RECOVERY_S
        await _check_idle(arena)
        assert {0} == set(_said(arena, "redis_unreachable").values())
