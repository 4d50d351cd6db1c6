"""What a tenant that floods the queue costs one that doesn't, and whether busy tenants get the shares of their weights."""

import asyncio
import time
from functools import partial

from bench.queue.load import chat, closed_loop
from bench.queue.rows import Row, percentile
from bench.queue.setting import Fleet, Setting
from bench.queue.wire import Answer, connect

FLOOD = 100
WEIGHTS = (1, 2, 4)
CLIENTS_PER_TENANT = 24
GOAL_RATIO, GOAL_JAIN = 1.5, 0.95
QUIET_TEXT = "A question of some length. " * 30
QUIET_PAUSE_S = 0.1
RAMP_S = 3.0  # until all that flood have found the line


async def measure(setting: Setting) -> list[Row]:
    """Two workers of eight slots: the flood holds them all and waits in line for more."""
    # Slow ones: it's the order of the queue that is measured, not what the processors make of a flood.
    rates = ("--prefill-rate", "1000", "--decode-rate", "50", "--max-sequences", "8")
    async with setting.fleet("fairness", 2, *rates) as fleet:
        return [await _flood_row(fleet, setting), await _share_row(fleet, setting)]


async def _flood_row(fleet: Fleet, setting: Setting) -> Row:
    port = fleet.gateways[0].port
    quiet, loud = await fleet.new_key("quiet"), await fleet.new_key("loud")
    seconds = 5 * setting.seconds
    solo = await _one_by_one(port, quiet, seconds)
    flood = asyncio.create_task(closed_loop(port, partial(_busy, loud), FLOOD, seconds + 2 * RAMP_S))
    await asyncio.sleep(RAMP_S)
    beside = await _one_by_one(port, quiet, seconds)
    await flood
    ratio = percentile(beside, 0.95) / percentile(solo, 0.95)
    return Row(
        f"p95 TTFT of a quiet tenant while another floods with {FLOOD} clients",
        f"{ratio:.2f}x its solo value ({percentile(beside, 0.95):.0f} against {percentile(solo, 0.95):.0f} ms)",
        f"at most {GOAL_RATIO:g}x",
        ratio <= GOAL_RATIO,
        {"solo_ms": solo, "beside_ms": beside, "ratio": ratio},
    )


async def _one_by_one(port: int, key: str, seconds: float) -> list[float]:
    """TTFTs in ms of one client that asks now and then."""
    connection = await connect(port)
    found: list[float] = []
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        # A salt for each request: a cached prompt would have no prefill to measure.
        raw = chat(key, 8, stream=True, text=QUIET_TEXT, cache_salt=str(time.time_ns()))
        answer = await connection.ask(raw)
        if answer.status != 200:
            raise RuntimeError(f"the quiet tenant was answered with {answer.status}")
        found.append((answer.first_byte_s - answer.sent_s) * 1e3)
        await asyncio.sleep(QUIET_PAUSE_S)
    connection.close()
    return found


async def _share_row(fleet: Fleet, setting: Setting) -> Row:
    name = f"Jain index of served tokens over the weights {', '.join(map(str, WEIGHTS))}"
    goal = f"at least {GOAL_JAIN:g}"
    try:
        keys = [await fleet.new_key(f"w{weight}", "--weight", str(weight)) for weight in WEIGHTS]
    except RuntimeError as error:
        if "--weight" not in str(error):
            raise
        return Row(name, "not measured: tenants have no weights in this build", goal, None)
    port, started_s = fleet.gateways[0].port, time.perf_counter()
    found = await asyncio.gather(
        *(closed_loop(port, partial(_busy, key), CLIENTS_PER_TENANT, setting.seconds * 4) for key in keys)
    )
    served = [_tokens([answer for answer in answers if answer.end_s > started_s + RAMP_S]) for answers, _ in found]
    shares = [tokens / weight for tokens, weight in zip(served, WEIGHTS, strict=True)]
    jain = sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
    return Row(name, f"{jain:.3f}", goal, jain >= GOAL_JAIN, {"tokens": served, "weights": WEIGHTS, "jain": jain})


def _busy(key: str, number: int) -> bytes:
    # 8 to 56 tokens: answers of one length would end, and free their slots, all at the same time.
    return chat(key, 8 + number * 7 % 49, stream=True, text=f"Me {number}!")


def _tokens(answers: list[Answer]) -> int:
    return sum(answer.num_tokens for answer in answers)
