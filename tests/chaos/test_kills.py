"""Processes die and stall at random points of requests' lives: each living client is told exactly one end, and never a wrong word."""

import asyncio
import os

import pytest

NUM_KILLS = int(os.environ.get("CHAOS_KILLS", "3"))
NUM_REAL_KILLS = int(os.environ.get("CHAOS_REAL_KILLS", "2"))
NUM_CLIENTS = 16
PROMPTS = [f"Question number {number}." for number in range(8)]
# A request that was never accepted. Without resuming, one may also lose its worker; a broken answer is never right.
REFUSED = {"model_unavailable", "overloaded", "starting"}

pytestmark = pytest.mark.timeout(300 + 30 * (NUM_KILLS + NUM_REAL_KILLS))


async def _undisturbed(arena) -> dict[str, str]:
    """The answers of a quiet fleet, by prompt."""
    outcomes = [await arena.ask(arena.body(prompt)) for prompt in PROMPTS]
    assert all(outcome.is_complete for outcome in outcomes)
    return dict(zip(PROMPTS, (outcome.text for outcome in outcomes), strict=True))


async def _client(arena, ended: asyncio.Event) -> None:
    while not ended.is_set():
        outcome = await arena.ask(arena.body(arena.random.choice(PROMPTS)))
        if not outcome.is_complete:
            await asyncio.sleep(0.1)


async def _under_load(arena, disturb) -> None:
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(_client(arena, ended)) for _ in range(NUM_CLIENTS)]
        try:
            await asyncio.sleep(1.0)
            await disturb()
            await asyncio.sleep(1.0)
        finally:
            ended.set()
        await asyncio.wait(clients)


def _check_answers(arena, expected: dict[str, str]) -> None:
    num_complete = 0
    for body, outcome in arena.outcomes:
        prompt = body["messages"][0]["content"]
        if outcome.is_complete:
            num_complete += 1
            assert expected[prompt] == outcome.text
            assert outcome.completion_tokens is not None
        else:
            # Even one that was cut off said nothing but the beginning of its answer.
            assert expected[prompt].startswith(outcome.text)
            assert outcome.is_lost or outcome.error in REFUSED, outcome
    assert num_complete > len(PROMPTS)


async def test_workers_that_are_killed(new_arena) -> None:
    """kill -9 in the middle of streams, again and again."""
    # Of a hundred kills some meet the same request four times, after which it would be given up as what takes its workers down.
    async with new_arena(1, 3, "--decode-rate", "40", "--max-deliveries", "100") as arena:
        expected = await _undisturbed(arena)

        async def disturb() -> None:
            for _ in range(NUM_KILLS):
                await arena.kill_worker()
                await asyncio.sleep(arena.random.uniform(0.5, 2.5))

        await _under_load(arena, disturb)
        _check_answers(arena, expected)


async def test_workers_that_stall_and_wake_up(new_arena) -> None:
    """SIGSTOP until others have taken over, then SIGCONT: what the zombie still writes reaches nobody."""
    async with new_arena(1, 3, "--decode-rate", "40") as arena:
        expected = await _undisturbed(arena)

        async def disturb() -> None:
            for _ in range(max(NUM_KILLS // 3, 1)):
                await arena.freeze_worker(seconds=6.0)

        await _under_load(arena, disturb)
        _check_answers(arena, expected)


async def test_gateways_that_are_killed(new_arena) -> None:
    """Clients of the other gateway notice nothing, and the jobs of the dead one don't hold the workers up."""
    async with new_arena(2, 2, "--decode-rate", "40") as arena:
        expected = await _undisturbed(arena)

        async def disturb() -> None:
            for _ in range(max(NUM_KILLS // 3, 1)):
                await arena.kill_gateway()
                await arena.fleet.wait_until_ready()

        await _under_load(arena, disturb)
        _check_answers(arena, expected)
        assert any(outcome.is_lost for _, outcome in arena.outcomes)
        async with asyncio.timeout(60):
            while any(status["running_sequences"] for status in await arena.fleet.statuses()):
                await asyncio.sleep(0.2)


async def test_the_real_engine_goes_on_where_it_was_killed(new_arena, smollm2_path) -> None:
    """The worker of a stream dies in the middle of it: the answer is that of an undisturbed one, word for word."""
    engine = ("--model", str(smollm2_path), "--name", "small", "--kv-tokens", "4096")
    async with new_arena(1, 2, engine=engine, model="small") as arena:
        body = arena.body("Tell me about the sea.", max_tokens=60)
        expected = await arena.ask(body)
        assert expected.is_complete
        for _ in range(NUM_REAL_KILLS):
            num_before = len(arena.outcomes)
            asking = asyncio.create_task(arena.ask(body))
            await asyncio.sleep(arena.random.uniform(0.1, 1.0))
            busy = [status["pid"] for status in await arena.fleet.statuses() if status["running_sequences"]]
            victim = next((worker for worker in arena.fleet.workers if worker.pid in busy), arena.fleet.workers[0])
            arena.fleet.kill(victim)
            await arena._replace(victim)
            assert expected == await asking
            assert num_before + 1 == len(arena.outcomes)
            await arena.fleet.wait_until_ready()
