"""What an operator sees: queues by class of tenant, times, batches, pages, liveness; with labels that clients can't multiply."""

import asyncio
import json
import re

import pytest

from gateway.metrics import JobMoment, Metrics, Moment
from gateway.model_directory import Fleet
from protocol.ids import ModelName, WorkerId
from protocol.model_card import WorkerStatus
from protocol.replies import Delta, Done, Started

MODEL, WORKER = ModelName("m/1"), WorkerId("w1")


def _moment(*jobs: JobMoment, live: bool = True, **fields) -> Moment:
    status = WorkerStatus(WORKER, MODEL, "d", 100, 60, 10, 1, 0, 8, **fields)
    fleet = Fleet({MODEL: [status]}, {MODEL: {WORKER}}) if live else Fleet()
    return Moment(fleet, True, len(jobs), jobs, 2, 0)


def _value(text: bytes, name: str) -> float:
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.MULTILINE)[1])


async def test_jobs_by_class_and_state():
    """Jobs are counted by class of tenant and state; classes without jobs are shown as 0, those of before are forgotten."""
    metrics, now_s = Metrics(), asyncio.get_running_loop().time()
    jobs = [
        JobMoment(MODEL, "high", "queued", now_s - 5),
        JobMoment(MODEL, "high", "queued", now_s),
        JobMoment(MODEL, "low", "running", now_s),
    ]
    text = metrics.render(_moment(*jobs))
    assert 2 == _value(text, 'sluicegate_jobs{model="m/1",state="queued",tenant_class="high"}')
    assert 1 == _value(text, 'sluicegate_jobs{model="m/1",state="running",tenant_class="low"}')
    assert 0 == _value(text, 'sluicegate_jobs{model="m/1",state="queued",tenant_class="standard"}')
    assert 5 <= _value(text, 'sluicegate_oldest_queued_seconds{tenant_class="high"}') < 60
    assert 0 == _value(metrics.render(_moment()), 'sluicegate_jobs{model="m/1",state="queued",tenant_class="high"}')


async def test_batch_sizes():
    """A worker's counts become a histogram."""
    text = Metrics().render(_moment(batch_sizes=(5, 0, 2, 0, 0, 0, 0, 0, 0, 1), batched_sequences=300))
    head = 'sluicegate_worker_batch_size_bucket{le="%s",model="m/1",worker="w1"}'
    assert [5, 5, 7, 7, 8] == [_value(text, head % bound) for bound in ("1.0", "2.0", "4.0", "256.0", "+Inf")]
    assert 300 == _value(text, 'sluicegate_worker_batch_size_sum{model="m/1",worker="w1"}')


async def test_a_worker_that_has_gone_is_down():
    """It is shown as down, draining ones as half up, and only so many of the gone are remembered."""
    metrics, name = Metrics(), 'sluicegate_worker_up{model="m/1",worker="w1"}'
    assert 1 == _value(metrics.render(_moment()), name)
    assert 0.5 == _value(metrics.render(_moment(is_draining=True)), name)
    assert 0 == _value(metrics.render(_moment(live=False)), name)
    for number in range(200):
        metrics.render(Moment(Fleet({}, {MODEL: {WorkerId(f"w{number}")}}), True, 0, (), 2, 0))
    assert 80 > metrics.render(_moment(live=False)).count(b"sluicegate_worker_up{")


async def test_a_queued_and_a_running_job(gateway, worker, kit, soon):
    """Through the door: a job is queued until a worker has it, then running, then gone; times are by model."""
    done = asyncio.Event()

    async def wait(one, job):
        await one.send(job, Started(one.worker_id))
        await done.wait()
        await one.send(job, Delta(0, "x", (1,)), Delta(0, "y", (2,), finish_reason="stop"), Done(1, 0, 2))

    one = await worker(wait, is_taking=False)
    running = await gateway()

    async def jobs(state):
        text = (await running.get("/metrics", Authorization=f"Bearer {kit.admin_key}"))[1]
        return _value(text, f'sluicegate_jobs{{model="tiny/chat",state="{state}",tenant_class="standard"}}')

    answer = asyncio.create_task(running.stream())
    await soon(lambda: _is(jobs, "queued", 1))
    one.is_taking = True
    await soon(lambda: _is(jobs, "running", 1))
    done.set()
    await answer
    assert [0, 0] == [await jobs("queued"), await jobs("running")]
    text = (await running.get("/metrics", Authorization=f"Bearer {kit.admin_key}"))[1]
    assert 1 == _value(text, 'sluicegate_time_to_first_token_seconds_count{model="tiny/chat"}')
    assert 1 == _value(text, f'sluicegate_worker_up{{model="tiny/chat",worker="{one.worker_id}"}}')


async def _is(jobs, state, count):
    return await jobs(state) == count


async def test_clients_cannot_multiply_labels(gateway, worker, kit):
    """Models, paths, methods, ids and statuses that a client makes up add no time series but the unmatched ones."""
    await worker()
    running = await gateway()
    admin = f"Bearer {kit.admin_key}"
    await running.chat()

    async def num_series():
        return (await running.get("/metrics", Authorization=admin))[1].count(b"\n")

    for number in range(5):
        await _made_up(running, number)
    await num_series()  # it is counted itself
    before = await num_series()
    for number in range(5, 40):
        await _made_up(running, number)
    assert before == await num_series()


async def _made_up(running, number):
    await running.get(f"/made/up/{number}")
    await running.get(f"/v1/models/made-up-{number}", **running.headers())
    await running.post(
        "/v1/chat/completions",
        {"model": f"m{number}", "messages": []},
        headers=running.headers(**{"X-Request-Id": f"r{number}"}),
    )


async def test_liveness_is_tied_to_progress(gateway, worker, monkeypatch, kit):
    """When the look-out that ends lost requests stands still, or a part has ended, the process calls itself dead."""
    await worker()
    running = await gateway()
    assert 200 == (await running.get("/health/live"))[0]
    monkeypatch.setattr("gateway.health.STALL_S", 0.2)
    await asyncio.sleep(0.1)
    monkeypatch.setattr("gateway.model_directory.REFRESH_S", 60)
    await asyncio.sleep(1.2)
    status, raw = await running.get("/health/live")
    assert (503, "stalled") == (status, json.loads(raw)["status"])
    monkeypatch.setattr("gateway.health.STALL_S", 1000)
    assert 200 == (await running.get("/health/live"))[0]
    ended = asyncio.create_task(asyncio.sleep(0))
    await ended
    running.parts.tasks.append(ended)
    assert 503 == (await running.get("/health/live"))[0]


@pytest.mark.parametrize("weight", [(0.5, "low"), (1, "standard"), (1.0, "standard"), (3, "high")])
def test_classes(weight):
    """By weight: three of them."""
    from gateway.metrics import tenant_class

    assert weight[1] == tenant_class(weight[0])
