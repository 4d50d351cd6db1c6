"""Processes die and stall at random points of requests' lives: each living client is told exactly one end, and never a wrong word."""

import asyncio
import json
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


RULES = {
    "plain": {"temperature": 0},
    "rules": {
        "temperature": 0.9, "seed": 5, "n": 2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": True, "top_logprobs": 2,
        "stop": ["zzz", "qqq"],
    },
}  # fmt: skip


async def _all_told(arena, body: dict, at_event: int | None = None, then=None) -> tuple[dict, float]:
    """All that a stream says, by choice, and its longest pause; `then` is called at an event."""
    loop = asyncio.get_running_loop()
    told: dict = {"usage": None}
    pause_s, last_s, number = 0.0, loop.time(), 0
    url, headers = arena.fleet.gateways[0].url, {"Authorization": f"Bearer {arena.key}"}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with arena.session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            pause_s, last_s, number = max(pause_s, loop.time() - last_s), loop.time(), number + 1
            event = json.loads(line[6:])
            told["usage"] = event.get("usage") or told["usage"]
            for choice in event["choices"]:
                text, entries, finish = told.setdefault(choice["index"], ("", [], None))
                entries = entries + ((choice.get("logprobs") or {}).get("content") or [])
                text += choice["delta"].get("content") or ""
                told[choice["index"]] = (text, entries, choice["finish_reason"] or finish)
            if number == at_event:
                await then()
    return told, pause_s


@pytest.mark.parametrize("name", RULES)
async def test_a_death_is_noticed_in_three_seconds_and_told_once(new_arena, name: str) -> None:
    """Text, logprobs, finish reasons and usage are those of an undisturbed stream; the pause is that of the default lease; one line in the log."""
    async with new_arena(1, 2, "--decode-rate", "40") as arena:
        body = arena.body("A question.", max_tokens=120, ignore_eos=True, **RULES[name])
        expected, _ = await _all_told(arena, body)
        if name == "plain":
            assert 120 == expected["usage"]["completion_tokens"]

        async def kill() -> None:
            busy = [status["pid"] for status in await arena.fleet.statuses() if status["running_sequences"]]
            arena.fleet.kill(next(worker for worker in arena.fleet.workers if worker.pid in busy))

        told, pause_s = await _all_told(arena, body, 40, kill)
        for usage in (told["usage"], expected["usage"]):
            usage.pop("prompt_tokens_details", None)  # the second one finds its prompt in the cache
        assert expected == told
        print(f"{name}: paused for {pause_s:.2f} s")
        assert 1.0 < pause_s < 3.0 + 0.5  # and the tokens up to there computed once more
        assert 1 == arena.fleet.gateways[0].child.log.read_text().count('"request_continues"')


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
