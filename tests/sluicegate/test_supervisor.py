"""The supervisor over a real Valkey and stand-ins for gateway and workers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.tenant_store import TenantStore
from protocol.key_space import KeySpace
from sluicegate.child import start_time
from sluicegate.errors import CommandError
from sluicegate.secrets import admin_key, derived_keys
from sluicegate.stack_settings import StackSettings
from sluicegate.supervisor import Supervisor


@pytest.fixture
def said() -> list[str]:
    """What the supervisor told the user."""
    return []


@pytest.fixture
async def make(
    stand_ins, data: Path, model_file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Supervisor]]:
    """Supervisors of one stack; what they left running is stopped."""
    monkeypatch.setattr(sys, "executable", str(stand_ins.executable))
    made: list[Supervisor] = []

    def supervisor(workers: int = 1) -> Supervisor:
        settings = StackSettings(
            data=data, host="127.0.0.1", port=0, model_name="tiny", model=model_file, workers=workers, kv_dtype="bf16",
            integrity="lease", allow_fault_injection=False, kv_tokens=1024, page_size=16, max_sequences=4, drain_grace_s=5.0,
        )  # fmt: skip
        made.append(Supervisor(settings, said.append))
        return made[-1]

    yield supervisor
    for one in made:
        await one.stop(hurry=True)


def _stack(data: Path) -> dict:
    return json.loads((data / "stack.json").read_text())


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_stack_json_says_all_that_scripts_need(make, data: Path) -> None:
    """The published fields, in a private file, are there when the stack is ready."""
    supervisor = make(workers=2)
    await supervisor.start()
    stack = _stack(data)
    pids = stack["pids"]
    everyone = [stack["supervisor"], pids["redis"], *pids["gateway"], *pids["workers"]]
    assert 0o600 == (data / "stack.json").stat().st_mode & 0o777
    assert (supervisor.url, "demo", supervisor.demo_key) == (stack["url"], stack["tenant"], stack["key"])
    assert (admin_key(data), "tiny", os.getpid()) == (stack["admin_key"], stack["model"], stack["supervisor"])
    assert (1, 2, 5) == (len(pids["gateway"]), len(pids["workers"]), len(set(everyone)))
    assert {str(pid): start_time(pid) for pid in everyone} == stack["started"]


async def test_redis_wants_its_password(make, data: Path) -> None:
    """The URL in stack.json opens the embedded Valkey; without its password nobody gets in."""
    await make().start()
    url = _stack(data)["redis_url"]
    async with Redis.from_url(url) as client:
        assert await client.ping()
        assert "noeviction" == (await client.config_get("maxmemory-policy"))["maxmemory-policy"]
        assert "127.0.0.1" == (await client.config_get("bind"))["bind"]
    async with Redis.from_url("redis://" + url.partition("@")[2]) as client:
        with pytest.raises(Exception, match=r"authenticated|Authentication"):
            await client.ping()


async def test_the_demo_key_works_and_stays(make, data: Path) -> None:
    """Tenants and keys survive a stop and a start."""
    first = make()
    await first.start()
    key = first.demo_key
    await first.stop()
    second = make()
    await second.start()
    assert key == second.demo_key
    async with Redis.from_url(_stack(data)["redis_url"]) as client:
        store = TenantStore(client, KeySpace(), derived_keys(data).key_pepper)
        record = await store.find_key(key)
        assert "demo" == record.tenant
        assert 1 == len(await store.keys())


async def test_all_end_in_the_order_of_need(make, data: Path, stand_ins) -> None:
    """The gateway has ended before a worker is told to, and Valkey is last; stack.json is gone."""
    supervisor = make(workers=2)
    await supervisor.start()
    stack = _stack(data)
    pids = stack["pids"]
    await _until(lambda: 3 == len(stand_ins.notes()))
    await supervisor.stop()
    ends = [note for note in stand_ins.notes() if "started" not in note]
    assert ["gateway told to end", "gateway ended"] == ends[:2]
    assert ["worker ended"] * 2 + ["worker told to end"] * 2 == sorted(ends[2:])
    assert [None] * 4 == [start_time(pid) for pid in (pids["redis"], *pids["gateway"], *pids["workers"])]
    assert not (data / "stack.json").exists()


@pytest.mark.parametrize(("kind", "name"), [("gateway", "gateway"), ("workers", "worker-0")])
async def test_a_dead_process_is_replaced(make, data: Path, said: list[str], kind: str, name: str) -> None:
    """A killed gateway or worker is started again, and stack.json names the new one."""
    await make(workers=2).start()
    before = _stack(data)
    victim = before["pids"][kind][0]
    os.kill(victim, signal.SIGKILL)
    await _until(lambda: _stack(data)["pids"][kind][0] != victim)
    after = _stack(data)
    replaced = after["pids"][kind][0]
    assert start_time(replaced) == after["started"][str(replaced)]
    assert str(victim) not in after["started"]
    assert before["pids"][kind][1:] == after["pids"][kind][1:]
    assert [f"{name} ended with code -9; starting it again in 0.5 s"] == said


async def test_a_replaced_process_is_stopped_too(make, data: Path) -> None:
    """stop() ends the processes that run now, not those of the start."""
    supervisor = make()
    await supervisor.start()
    victim = _stack(data)["pids"]["workers"][0]
    os.kill(victim, signal.SIGKILL)
    await _until(lambda: _stack(data)["pids"]["workers"] != [victim])
    (replaced,) = _stack(data)["pids"]["workers"]
    await supervisor.stop()
    assert start_time(replaced) is None


async def test_the_end_of_redis_is_the_end_of_the_stack(make, data: Path, said: list[str]) -> None:
    """Without its Valkey the stack can't go on, and says so."""
    supervisor = make()
    await supervisor.start()
    os.kill(_stack(data)["pids"]["redis"], signal.SIGKILL)
    async with asyncio.timeout(10):
        await supervisor.wait_for_failure()
    assert ["the embedded Valkey ended with code -9; the stack stops"] == said


async def test_a_process_that_cannot_start_fails_the_start(make, data: Path, stand_ins, monkeypatch) -> None:
    """The error is the process's last line; what had started has ended."""
    monkeypatch.setenv("STAND_IN_BROKEN", "gateway")
    with pytest.raises(CommandError, match=r"gateway did not start: .*the gateway has no luck \(log: .*gateway\.log\)"):
        await make().start()
    assert not (data / "stack.json").exists()
    assert stand_ins.notes().count("worker started") == stand_ins.notes().count("worker ended")


async def test_a_json_log_line_is_shown_as_its_error(make, stand_ins, monkeypatch) -> None:
    """A process whose last line is a log record is quoted by the record's error."""
    script = stand_ins.executable.read_text()
    broken = 'sys.exit(\'{"event": "crashed", "error": "no memory"}\')'
    stand_ins.executable.write_text(script.replace('sys.exit(f"sluicegate: the {kind} has no luck")', broken))
    monkeypatch.setenv("STAND_IN_BROKEN", "gateway")
    with pytest.raises(CommandError, match=r"gateway did not start: no memory \(log: "):
        await make().start()


async def test_a_start_that_is_cancelled_leaves_nothing(make, data: Path, stand_ins, monkeypatch) -> None:
    """Ctrl-C while the gateway is not ready yet ends what has started."""
    monkeypatch.setenv("STAND_IN_UNREADY", "1")
    starting = asyncio.create_task(make().start())
    await _until(lambda: 2 == len(stand_ins.notes()))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert 2 == sum(note.endswith("ended") for note in stand_ins.notes())
    assert not (data / "stack.json").exists()
