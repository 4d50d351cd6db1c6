"""Processes that are replaced one by one under load, and one whose forward pass hangs: no client notices more than a pause."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sluicegate.child import Child

NUM_CLIENTS = 8
RATES = ("--decode-rate", "100")

# A worker whose forward pass hangs for as long as a file exists.
HANGING = """
import pathlib, sys, time
from worker.synthetic import executor
run = executor.SyntheticExecutor.run
def hang(self, batch, pool):
    while pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return run(self, batch, pool)
executor.SyntheticExecutor.run = hang
from sluicegate.command import main
main(["worker", *sys.argv[2:]])
"""

# A worker whose device fails as soon as a file exists.
FAILING = """
import pathlib, sys
from worker.errors import DeviceLostError
from worker.synthetic import executor
run = executor.SyntheticExecutor.run
def fail(self, batch, pool):
    if pathlib.Path(sys.argv[1]).exists():
        raise DeviceLostError("the GPU failed: out of luck")
    return run(self, batch, pool)
executor.SyntheticExecutor.run = fail
from sluicegate.command import main
sys.exit(main(["worker", *sys.argv[2:]]))
"""


async def test_gateways_and_workers_are_restarted_under_load_and_no_request_fails(new_arena) -> None:
    """SIGTERM to each gateway and each worker in turn, with another in its place before: all answers are whole and right."""
    async with new_arena(2, 2, *RATES) as arena:
        expected = {n: (await arena.ask(arena.body(f"Question {n}."))).text for n in range(4)}
        is_over = asyncio.Event()

        async def client(number: int) -> None:
            """As behind a load balancer: a request goes to a gateway that isn't leaving."""
            body, text = arena.body(f"Question {number % 4}."), expected[number % 4]
            while not is_over.is_set():
                if number % 2:
                    outcome = await arena.ask(body)
                    assert (True, text) == (outcome.is_complete, outcome.text), outcome
                    continue
                url, headers = arena.gateway().url, {"Authorization": f"Bearer {arena.key}"}
                async with arena.session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                    assert 200 == response.status, await response.text()
                    assert text == (await response.json())["choices"][0]["message"]["content"]

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(client(number)) for number in range(NUM_CLIENTS)]
            for old in list(arena.fleet.gateways):
                new = await arena.fleet.add_gateway()
                arena.unready_urls.add(new.url)  # it isn't there yet
                await arena.fleet.wait_until_ready()
                arena.unready_urls ^= {new.url, old.url}
                await asyncio.sleep(0.3)  # what is on its way arrives
                await _ended(old.child)
                await arena.fleet.reap()
            for worker in list(arena.fleet.workers):
                await arena.fleet.add_worker(*arena.worker_flags)
                await arena.fleet.wait_until_ready()
                await _ended(worker)
                await arena.fleet.reap()
            is_over.set()
            await asyncio.wait(clients)


async def _ended(child: Child) -> None:
    """SIGTERM, and a clean exit."""
    os.kill(child.pid, signal.SIGTERM)
    async with asyncio.timeout(40):
        assert 0 == await child.wait()


async def test_a_worker_that_leaves_while_redis_is_away_fails_nobody(new_arena) -> None:
    """SIGTERM without time for answers while Redis restarts: the worker ends well, and its answers go on elsewhere."""
    async with new_arena(1, 2, "--decode-rate", "40", "--drain-grace", "0") as arena:
        body = arena.body("A long answer, please.", ignore_eos=True, max_tokens=150)
        assert (whole := await arena.ask(body)).is_complete
        asking = [asyncio.create_task(arena.ask(body)) for _ in range(4)]
        await asyncio.sleep(1.0)
        busiest = max(await arena.fleet.statuses(), key=lambda status: status["running_sequences"])
        assert busiest["running_sequences"]
        leaving = next(worker for worker in arena.fleet.workers if worker.pid == busiest["pid"])
        arena.fleet.kill(arena.fleet.redis)
        await arena.fleet.redis.wait()
        os.kill(leaving.pid, signal.SIGTERM)
        await asyncio.sleep(1.0)
        await arena.restart_redis()
        assert [whole] * 4 == await asyncio.gather(*asking)
        async with asyncio.timeout(40):
            assert 0 == await leaving.wait()
        await arena.fleet.reap()


async def test_a_forward_pass_that_hangs_loses_its_jobs_and_gets_no_others(new_arena, tmp_path) -> None:
    """An answer goes on elsewhere from where it was, further requests aren't caught by the worker that hangs, and it serves again when it wakes."""
    stuck = tmp_path / "stuck"
    async with new_arena(1, 1) as arena:
        child, whole, asking = await _asked_of_an_odd_worker(arena, HANGING, stuck)
        stuck.touch()
        await asyncio.sleep(0.2)
        assert not asking.done()
        await arena.fleet.add_worker(*arena.worker_flags, *RATES)
        await arena.fleet.wait_until_ready()
        outcome = await asking
        assert (whole.text, 150) == (outcome.text, outcome.completion_tokens)
        loop = asyncio.get_running_loop()
        for number in range(6):
            started_s = loop.time()
            assert (await arena.ask(arena.body(f"Question {number}.", max_tokens=4))).is_complete
            assert loop.time() - started_s < 1.0  # less than a lease
        stuck.unlink()
        (other,) = arena.fleet.workers
        arena.fleet.kill(other)
        assert (await arena.ask(arena.body("Are you there?"))).is_complete
        assert child.is_running
        await child.end(20)
        log = child.log.read_text()
    assert "engine_stalled" in log
    assert "engine_goes_on" in log


@pytest.mark.parametrize("is_leaving", [False, True], ids=["at-work", "while-it-drains"])
async def test_a_worker_whose_gpu_fails_ends_and_its_answers_go_on(new_arena, tmp_path, is_leaving) -> None:
    """Nothing else would succeed in that process: it says so in one line, and the answer is whole all the same, long before its lease would be over."""
    broken = tmp_path / "broken"
    async with new_arena(1, 1) as arena:
        child, whole, asking = await _asked_of_an_odd_worker(arena, FAILING, broken, lease_s=60)
        if is_leaving:
            os.kill(child.pid, signal.SIGTERM)
            await asyncio.sleep(0.2)
        assert not asking.done()
        broken.touch()
        async with asyncio.timeout(20):
            assert 1 == await child.wait()
        await arena.fleet.add_worker(*arena.worker_flags, *RATES)
        async with asyncio.timeout(20):
            outcome = await asking
        assert (whole.text, 150) == (outcome.text, outcome.completion_tokens)
        lines = child.log.read_text().splitlines()
    assert "sluicegate: the GPU failed: out of luck" == lines[-1]
    assert not [line for line in lines if "Traceback" in line]


async def _asked_of_an_odd_worker(
    arena, script: str, file: Path, lease_s: float = 1
) -> tuple[Child, Any, asyncio.Future]:
    """The only worker that there is, a whole answer of it, and the same question asked again, which it is in the middle of."""
    child = await _odd_worker(arena, script, file, lease_s)
    await _ended(arena.fleet.workers[0])
    await arena.fleet.reap()
    body = arena.body("A long answer, please.", ignore_eos=True, max_tokens=150)
    whole = await arena.ask(body)
    assert whole.is_complete
    asking = asyncio.ensure_future(arena.ask(body))
    await asyncio.sleep(0.5)
    return child, whole, asking


async def _odd_worker(arena, script: str, file: Path, lease_s: float) -> Child:
    flags = (*arena.worker_flags, *RATES, "--stall", "1", "--lease", str(lease_s))
    environment = {
        **os.environ,
        "SLUICEGATE_REDIS_URL": arena.fleet.redis_url,
        "SLUICEGATE_DATA": str(arena.fleet.folder),
    }
    command = [sys.executable, "-c", script, str(file), *flags]
    child = await Child.start("odd", command, arena.fleet.folder / "logs" / "odd.log", environment)
    async with asyncio.timeout(60):
        while len(await arena.fleet.statuses()) < 2:
            await asyncio.sleep(0.1)
    return child
