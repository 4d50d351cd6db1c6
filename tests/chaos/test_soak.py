"""Many requests, a fifth of them abandoned, under kills of workers and gateways: afterwards everything is as it was before."""

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "400"))
NUM_WORKER_KILLS = max(NUM_REQUESTS // 4000, 1)
NUM_GATEWAY_KILLS = max(NUM_REQUESTS // 20_000, 1)
NUM_CLIENTS = 24
ABORTS = 0.2
TENANTS = ("one", "two", "three")
SETTLE_S = 150.0
# A gateway's pool of connections to Redis may grow to its bound.
FD_SLACK = 70
RSS_SLACK_BYTES = 48 << 20

pytestmark = pytest.mark.timeout(600 + NUM_REQUESTS // 20)

# One hash for all keys of all tenants, written now and then.
LATE = {"sg:{tenancy}:last_used"}
_IDS = re.compile(r"(worker|gateway)-[0-9a-f]{16}")


@dataclass
class Idle:
    """A fleet at rest. Keys are counted by their names without process ids; those with a time to live of minutes go by themselves."""

    keys: dict[str, int]
    num_pending: int
    foreign_consumers: set[str]
    pages_held: int
    fds: dict[str, int]
    rss_bytes: dict[str, int]


def _process(pid: int) -> tuple[int, int]:
    folder = Path(f"/proc/{pid}")
    resident = int((folder / "statm").read_text(encoding="ascii").split()[1])
    return len(list((folder / "fd").iterdir())), resident * os.sysconf("SC_PAGE_SIZE")


async def _idle(fleet) -> Idle:
    statuses = await fleet.statuses()
    ids = {status["worker_id"] for status in statuses}
    client = fleet.client()
    keys: dict[str, int] = {}
    num_pending, consumers = 0, set()
    async for raw in client.scan_iter(count=1000):
        if 0 < await client.ttl(raw) <= 120 and not _IDS.search(raw.decode()):
            continue
        name = _IDS.sub(r"\1-*", raw.decode())
        keys[name] = keys.get(name, 0) + 1
        if await client.type(raw) == b"stream":
            for group in await client.xinfo_groups(raw):
                num_pending += group["pending"]
                consumers |= {row["name"].decode() for row in await client.xinfo_consumers(raw, group["name"])}
    await client.aclose()
    kinds = {"gateway": [gateway.child for gateway in fleet.gateways], "worker": fleet.workers}
    used = {kind: [_process(child.pid) for child in children] for kind, children in kinds.items()}
    return Idle(
        keys,
        num_pending,
        {name for name in consumers - ids if name.startswith("worker-")},
        sum(status["pages_total"] - status["pages_free"] - status["pages_cached"] for status in statuses),
        {kind: max(fds for fds, _ in values) for kind, values in used.items()},
        {kind: max(rss for _, rss in values) for kind, values in used.items()},
    )


async def _request(arena, keys: list[str], aborts: float) -> None:
    body = arena.body(f"Question {arena.random.randrange(50)}.", max_tokens=arena.random.randrange(1, 30))
    leave_after = arena.random.randrange(4) if arena.random.random() < aborts else None
    outcome = await arena.ask(body, leave_after, arena.random.choice(keys))
    if outcome.status not in (0, 200):
        await asyncio.sleep(0.1)


async def _clients(arena, keys: list[str], num_requests: int, aborts: float) -> None:
    remaining = iter(range(num_requests))

    async def client() -> None:
        for _ in remaining:
            await _request(arena, keys, aborts)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CLIENTS):
            tasks.create_task(client())


async def _kill_now_and_then(arena) -> None:
    """Spread over the run, at points that depend on how far it is."""
    start = len(arena.outcomes)
    kills = [arena.kill_worker] * NUM_WORKER_KILLS + [arena.kill_gateway] * NUM_GATEWAY_KILLS
    arena.random.shuffle(kills)
    for number, kill in enumerate(kills):
        while len(arena.outcomes) - start < NUM_REQUESTS * (number + 1) // (len(kills) + 1):
            await asyncio.sleep(0.02)
        await kill()
        if kill == arena.kill_gateway:
            await arena.fleet.wait_until_ready()


async def _settled(arena, before: Idle) -> Idle:
    """The state once it's that of before, or as it is when the time is up."""
    end_s = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        after = await _idle(arena.fleet)
        is_same = not (_grown(before, after) or after.num_pending or after.pages_held or after.foreign_consumers)
        if is_same or asyncio.get_running_loop().time() > end_s:
            return after
        await asyncio.sleep(1.0)


def _grown(before: Idle, after: Idle) -> dict[str, int]:
    """Keys of which there are more than before. A gateway that was started last may have no reply stream yet."""
    return {name: count for name, count in after.keys.items() if count > before.keys.get(name, 0) and name not in LATE}


async def _recorded_tokens(arena) -> int:
    """Completion tokens in all tenants' totals."""
    rows = (await arena.fleet.run("tenant", "list")).splitlines()
    return sum(int(row.split()[-1]) for row in rows if row.split()[0] in TENANTS)


async def test_everything_returns_to_its_idle_value(new_arena) -> None:
    """Redis keys, pending entries, consumers, pages, file descriptors, memory; and usage holds what clients were told."""
    async with new_arena(2, 3) as arena:
        keys = [await arena.fleet.new_key(tenant) for tenant in TENANTS]
        await _clients(arena, keys, 4 * NUM_CLIENTS, aborts=0.0)
        await asyncio.sleep(1.0)
        before = await _idle(arena.fleet)
        assert 0 == before.num_pending
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_clients(arena, keys, NUM_REQUESTS, ABORTS))
            tasks.create_task(_kill_now_and_then(arena))
        await arena.fleet.wait_until_ready()
        after = await _settled(arena, before)
        assert {} == _grown(before, after)
        assert 0 == after.num_pending
        assert set() == after.foreign_consumers
        assert 0 == after.pages_held
        for kind in before.fds:
            assert after.fds[kind] <= before.fds[kind] + FD_SLACK
            assert after.rss_bytes[kind] <= before.rss_bytes[kind] * 1.25 + RSS_SLACK_BYTES
        told = sum(outcome.completion_tokens or 0 for _, outcome in arena.outcomes if outcome.is_complete)
        most = sum(body["max_tokens"] for body, outcome in arena.outcomes if not outcome.is_complete)
        recorded = await _recorded_tokens(arena)
        # What the requests of killed gateways had used is lost with them.
        lost = sum(body["max_tokens"] for body, outcome in arena.outcomes if outcome.is_lost)
        assert told - lost <= recorded <= told + most
        assert sum(outcome.has_left for _, outcome in arena.outcomes) > NUM_REQUESTS * ABORTS / 3
