"""The same code on a Redis Cluster of three nodes and on Debian's Redis 7: answers, cancellation, a worker's death, nothing left behind."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from sluicegate.valkey import _binary, free_port

START_S = 20.0
NUM_NODES = 3
NUM_SLOTS = 16384


def _start(binary: str, port: int, folder: Path, *flags: str) -> subprocess.Popen:
    folder.mkdir()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *flags]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < end_s, "the servers did not start"
        time.sleep(0.05)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen]]:
    """Servers that a test started; ended with it."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.terminate()
        process.wait()


@pytest.fixture
def single_url(tmp_path: Path, processes) -> str:
    """Debian's redis-server, from the PATH or SLUICEGATE_TEST_REDIS_SERVER."""
    binary = os.environ.get("SLUICEGATE_TEST_REDIS_SERVER") or shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed (on Debian: apt-get install redis-server)")
    port = free_port()
    processes.append(_start(binary, port, tmp_path / "redis"))
    with redis.Redis(port=port) as client:
        _until(client.ping)
        assert 7 <= int(client.info("server")["redis_version"].partition(".")[0])
    return f"redis://127.0.0.1:{port}/0"


@pytest.fixture
def cluster_url(tmp_path: Path, processes) -> str:
    """Three nodes of the embedded server."""
    ports = [(free_port(), free_port()) for _ in range(NUM_NODES)]
    for number, (port, bus) in enumerate(ports):
        flags = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
        processes.append(_start(str(_binary()), port, tmp_path / f"node-{number}", *flags))
    clients = [redis.Redis(port=port, decode_responses=True) for port, _ in ports]
    for number, client in enumerate(clients):
        _until(client.ping)
        first, last = (NUM_SLOTS * place // NUM_NODES for place in (number, number + 1))
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        client.execute_command("CLUSTER", "MEET", "127.0.0.1", *ports[0])
    _until(lambda: all(f"cluster_slots_ok:{NUM_SLOTS}" in _plain(client) for client in clients))
    _until(lambda: all("cluster_state:ok" in _plain(client) for client in clients))
    for client in clients:
        client.close()
    return f"redis-cluster://127.0.0.1:{ports[0][0]}"


def _plain(client: redis.Redis) -> str:
    found = client.execute_command("CLUSTER", "INFO")
    return "\n".join(f"{key}:{value}" for key, value in found.items()) if isinstance(found, dict) else str(found)


async def _serves(arena) -> None:
    body = arena.body("A question.", max_tokens=60)
    expected = await arena.ask(body)
    assert expected.is_complete, expected
    many = await asyncio.gather(*(arena.ask(body) for _ in range(20)))
    assert [expected] * 20 == many
    left = await arena.ask(body, leave_after=3)
    assert left.has_left
    disturbed = [asyncio.create_task(arena.ask(body)) for _ in range(10)]
    await asyncio.sleep(0.5)
    await arena.kill_worker()
    for outcome in await asyncio.gather(*disturbed):
        assert expected == outcome
    await arena.fleet.wait_until_ready()
    assert expected == await arena.ask(body)
    async with asyncio.timeout(30):
        while any(status["running_sequences"] for status in await arena.fleet.statuses()):
            await asyncio.sleep(0.1)
    rows = (await arena.fleet.run("tenant", "list")).splitlines()
    recorded = int(next(row for row in rows if row.startswith("acme")).split()[-1])
    told = sum(outcome.completion_tokens or 0 for _, outcome in arena.outcomes)
    assert told <= recorded <= told + 11 * 60
    await _operates(arena)


async def _operates(arena) -> None:
    """Limits, usage, audit, rotation and deletion, on this server too."""
    run = arena.fleet.run
    await run("tenant", "update", "acme", "--limit", "requests_per_minute=1", "--budget", "month:tokens=1000000")
    await asyncio.sleep(1.0)
    outcomes = await asyncio.gather(*(arena.ask(arena.body("Another question.", max_tokens=2)) for _ in range(4)))
    assert 1 == sum(outcome.is_complete for outcome in outcomes)
    sums = json.loads(await run("usage", "--by", "hour", "--format", "json"))["totals"]
    rows = json.loads(await run("usage", "acme", "--by", "request", "--format", "json"))
    assert len(rows["data"]) == sums["requests"]
    assert rows["totals"]["completion_tokens"] == sums["completion_tokens"]
    assert 0 < len(await run("audit", "--kind", "key"))
    assert "acme" in await run("tenant", "delete", "acme")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["cluster", "single"], ids=["cluster of three", "redis 7"])
async def test_the_same_code_serves(kind: str, new_arena, request) -> None:
    """Streams, an abandoned stream, ten streams whose worker dies, usage."""
    url = request.getfixturevalue(f"{kind}_url")
    async with new_arena(2, 2, "--decode-rate", "40", redis_url=url) as arena:
        await _serves(arena)
