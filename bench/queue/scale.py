"""Throughput of 1 to 32 workers, and what the limit is where it stops to grow."""

import os
from pathlib import Path
from typing import Any

from bench.queue.cpu import cpu_s
from bench.queue.load import chat, closed_loop
from bench.queue.rows import Row
from bench.queue.setting import SYNTHETIC, Fleet, Setting

COUNTS = (1, 2, 4, 8, 16, 32)
SEQUENCES, RATE, NUM_TOKENS = 4, 20.0, 40
GOAL_SHARE = 0.9
BUSY = 0.9


async def measure(setting: Setting) -> list[Row]:
    """Workers of four slots at 20 tokens a second each, half as many clients again as there are slots. Linear is what one makes, times their number."""
    points = []
    flags = ("--decode-rate", f"{RATE:g}", "--max-sequences", str(SEQUENCES), "--kv-tokens", "4096")
    async with setting.fleet("scale", 1, *flags) as fleet:
        key = await fleet.new_key("acme")
        for count in COUNTS:
            while len(fleet.workers) < count:
                await fleet.add_worker(*SYNTHETIC, *flags)
            await fleet.wait_until_ready()
            points.append(await _point(fleet, key, count, setting.seconds * 2))
    per_worker = points[0]["tokens_per_s"]
    linear = [point for point in points if point["tokens_per_s"] >= GOAL_SHARE * per_worker * point["workers"]]
    reached = max((point["workers"] for point in linear), default=0)
    last = points[-1]
    share = last["tokens_per_s"] / (per_worker * last["workers"])
    limit = "" if reached == COUNTS[-1] else f"; then the limit is {last['limit']}"
    return [
        Row(
            "throughput of 1, 2, 4, 8, 16, 32 workers",
            f"within 10% of linear up to {reached}{limit} ({share:.0%} of linear at {last['workers']})",
            "within 10% of linear until Redis or the gateway is the limit",
            reached == COUNTS[-1] or last["limit"] in ("the gateway", "Redis"),
            {"points": points, "per_worker": per_worker},
        )
    ]


async def _point(fleet: Fleet, key: str, count: int, seconds: float) -> dict[str, Any]:
    assert fleet.redis is not None
    pids = {"the gateway": fleet.gateways[0].child.pid, "Redis": fleet.redis.pid}
    used = {name: cpu_s(pid) for name, pid in pids.items()}
    machine = _machine_s()
    answers, took_s = await closed_loop(
        fleet.gateways[0].port,
        lambda n: chat(key, NUM_TOKENS, stream=True, text=f"Hello {n}."),
        count * SEQUENCES * 3 // 2,
        seconds,
    )
    load = {name: (cpu_s(pid) - used[name]) / took_s for name, pid in pids.items()}
    busy, total = (now - then for now, then in zip(_machine_s(), machine, strict=True))
    tokens = sum(answer.num_tokens for answer in answers)
    return {
        "workers": count,
        "tokens_per_s": tokens / took_s,
        "cpu_of": load,
        "machine_busy": busy / total,
        "limit": _limit(load, busy / total),
    }


def _limit(load: dict[str, float], busy: float) -> str:
    for name, share in load.items():
        if share > BUSY:
            return name
    return f"this machine's {os.cpu_count()} cores ({busy:.0%} busy)" if busy > BUSY else "not the CPU"


def _machine_s() -> tuple[float, float]:
    """Busy and all CPU ticks of the machine since its start."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    total = sum(fields)
    return float(total - fields[3] - fields[4]), float(total)
