"""A client that leaves at any point of its request's life: job, lease, slot and pages are free within a quarter of a second and a step."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sluicegate.fleet import Fleet

FREE_S = 0.25
LOOK_S = 0.005
NUM_TIMES = 5
LIVE = "sg:{synthetic}:live"
LEASES = "sg:{synthetic}:leases"

pytestmark = pytest.mark.timeout(180)


@dataclass
class Watch:
    """The queue in Redis, looked at every few milliseconds."""

    fleet: Fleet

    def __post_init__(self) -> None:
        self.client = self.fleet.client()

    async def states(self) -> list[str]:
        """Of the jobs that were accepted and have not ended."""
        return [value.decode().partition("|")[0] for value in await self.client.hvals(LIVE)]

    async def until(self, condition, timeout_s: float = 20.0) -> float:
        """Seconds that it took."""
        started_s = time.monotonic()
        while not await condition():
            assert time.monotonic() - started_s < timeout_s, "it did not come true in time"
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - started_s

    async def is_state(self, wanted: list[str]) -> bool:
        return sorted(await self.states()) == wanted

    async def are_free(self, others: int) -> bool:
        """No record and no lease but those of `others`. A worker ends a record after it has given back the pages and the slot of its request."""
        return await self.client.hlen(LIVE) == others == await self.client.zcard(LEASES)


async def _leaves(asking: asyncio.Task) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _generated(arena) -> int:
    """Tokens since the worker started, as it says."""
    return sum(status["generated_tokens"] for status in await arena.fleet.statuses())


async def _check_workers(arena, watch: Watch, running: int = 0) -> None:
    """What the workers say of themselves agrees, as soon as they say something."""

    async def agree() -> bool:
        statuses = await arena.fleet.statuses()
        held = sum(status["pages_total"] - status["pages_free"] - status["pages_cached"] for status in statuses)
        slots = sum(status["running_sequences"] + status["waiting_sequences"] for status in statuses)
        return slots == running and (held > 0) == (running > 0)

    await watch.until(agree, 2.0)


def _ask(arena, **options) -> asyncio.Task:
    return asyncio.create_task(
        arena.ask(arena.body("A question.", **{"max_tokens": 400, "ignore_eos": True, **options}))
    )


async def _queued(arena, watch: Watch, number: int) -> float:
    """The only slot is another's."""
    other = _ask(arena)
    await watch.until(lambda: watch.is_state(["L"]))
    asking = _ask(arena)
    await watch.until(lambda: watch.is_state(["L", "W"]))
    await _leaves(asking)
    seconds = await watch.until(lambda: watch.are_free(1))
    assert not other.done(), number
    await _leaves(other)
    await watch.until(lambda: watch.are_free(0))
    return seconds


async def _prefill(arena, watch: Watch, number: int) -> float:
    """A prompt of some 20 steps, of which two or three are done."""
    asking = asyncio.create_task(arena.ask(arena.body(f"{number} word " * 700, max_tokens=4)))
    await watch.until(lambda: watch.is_state(["L"]))
    await asyncio.sleep(0.6)
    await _check_workers(arena, watch, running=1)
    await _leaves(asking)
    seconds = await watch.until(lambda: watch.are_free(0))
    assert 0 == await _generated(arena)
    return seconds


async def _decode(arena, watch: Watch, number: int) -> float:
    """Tokens come, one in a quarter of a second; where in a step the client leaves differs."""
    before = await _generated(arena)
    asking = _ask(arena)
    while await _generated(arena) < before + 2:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.05 * number)
    await _leaves(asking)
    return await watch.until(lambda: watch.are_free(0))


async def _between_batches(arena, watch: Watch, number: int) -> float:
    """Steps of no time: the cancellation meets the engine between two of them, each time at another place."""
    asking = _ask(arena, max_tokens=7000)
    await watch.until(lambda: watch.is_state(["L"]))
    await asyncio.sleep(0.01 * number)
    assert not asking.done()
    await _leaves(asking)
    return await watch.until(lambda: watch.are_free(0))


async def _after_the_last_token(arena, watch: Watch, number: int) -> float:
    """The client goes with the event of the last token: the end of the stream is under way or still to come."""
    body = arena.body(f"Question {number}.", max_tokens=3, ignore_eos=True)
    outcome = await arena.ask(body, leave_after=4)  # the role and three tokens
    assert outcome.has_left
    return await watch.until(lambda: watch.are_free(0))


@dataclass(frozen=True)
class Point:
    """Where in its life a request is when its client leaves, the worker's flags, and how long a step takes then."""

    leave: Callable[[Any, Watch, int], Awaitable[float]]
    step_s: float
    flags: tuple[str, ...] = ()


POINTS = {
    "queued": Point(_queued, 0.0, ("--decode-rate", "20", "--max-sequences", "1")),  # no worker is asked
    "prefill": Point(_prefill, 0.256, ("--prefill-rate", "1000")),  # 256 tokens
    "decode": Point(_decode, 0.25, ("--decode-rate", "4")),
    "between batches": Point(_between_batches, 0.0),
    "after the last token": Point(_after_the_last_token, 0.05, ("--decode-rate", "20")),
}


@pytest.mark.parametrize("name", POINTS)
async def test_a_client_that_leaves(new_arena, name: str) -> None:
    """From the client's leaving until Redis has neither record nor lease; the median, as test, gateway, worker and Redis share few cores."""
    point = POINTS[name]
    async with new_arena(1, 1, *point.flags) as arena:
        watch = Watch(arena.fleet)
        try:
            times_s = [await point.leave(arena, watch, number) for number in range(NUM_TIMES)]
            await _check_workers(arena, watch)
        finally:
            await watch.client.aclose()
    print(f"{name}: free after", ", ".join(f"{seconds * 1000:.0f}" for seconds in times_s), "ms")
    assert statistics.median(times_s) < FREE_S + point.step_s
