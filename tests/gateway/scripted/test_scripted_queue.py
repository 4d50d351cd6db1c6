"""The queue through the front door: refused jobs, poison, classes, bounds, lost jobs, a full or forgetful Redis."""

import asyncio
import dataclasses

import pytest
from redis.asyncio import Redis

from protocol.replies import Delta, Started
from protocol.signing import seal_job
from worker.consumer import Consumer
from worker.in_flight import InFlight


class _Recorder:
    """Stands where the engine's thread does: notes what it's given."""

    def __init__(self) -> None:
        self.jobs: list = []
        self.dropped: list = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def drop(self, request_id, attempt) -> None:
        self.dropped.append((request_id, attempt))


@pytest.fixture
async def consumer(worker, kit):
    """Starts a real consumer in the place of a scripted worker's loop; gives the recorder of its jobs and its scripted worker."""
    tasks = []

    async def start(**fields):
        one = await worker(is_taking=False, **fields)
        engine = _Recorder()
        link = one.queue._link
        real = Consumer(link, one.queue, one.model, kit.signing_key, 3, engine, InFlight(100))
        tasks.append((asyncio.create_task(real.run()), real))
        return engine, one

    yield start
    for task, real in tasks:
        real.stop()
        await task


CHANGES = ({"tenant": "other"}, {"attempt": 2}, {"model": "other/model"}, {"priority": "batch"}, {"gateway_id": "g2"})


# A signed job with another prompt would be another job.
@pytest.mark.parametrize(
    ("is_signed", "change"),
    [(False, {"prompt_token_ids": (1,)}), *((is_signed, change) for is_signed in (False, True) for change in CHANGES)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "moved" if value else "altered",
)
async def test_an_altered_job_is_refused_and_kept(gateway, consumer, kit, redis, keys, change, is_signed):
    """Another tenant, attempt, content or place than the gateway signed: no worker computes it, its client hears of it, it's in the dead letters."""
    engine, one = await consumer()
    running = await gateway()
    submitter = running.parts.generations._submitter

    async def sealed(job):
        changed = dataclasses.replace(job, **change)
        return seal_job(kit.signing_key if is_signed else b"x" * 32, changed)

    submitter._sealed = sealed
    status, body, _ = await running.chat()
    assert (500, "internal_error") == (status, body["error"]["code"])
    assert [] == engine.jobs
    ((_, fields),) = await redis.xrange(keys.dead(one.model))
    assert fields[b"reason"] == (b"misplaced" if is_signed else b"signature")
    assert not await redis.exists(keys.queue(one.model).live)


async def test_a_job_that_takes_its_workers_down_is_given_up(gateway, consumer, redis, keys, soon):
    """Three workers are lost with it; the fourth doesn't try."""
    engine, one = await consumer(lease_ms=100)
    running = await gateway()
    status, body, _ = await running.chat()
    assert (503, "worker_lost") == (status, body["error"]["code"])
    assert [1, 2, 3] == [job.attempt for job in engine.jobs]
    assert [1, 2] == [attempt for _, attempt in engine.dropped]
    ((_, fields),) = await redis.xrange(keys.dead(one.model))
    assert (b"poisonous", b"4") == (fields[b"reason"], fields[b"deliveries"])


async def test_a_stale_attempt_is_refused(gateway, worker, soon, kit):
    """A worker that was frozen goes on writing: nothing of it reaches the stream, and it's told."""
    wakes = asyncio.Event()

    async def freeze(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "Hel", (1,)))
        await wakes.wait()
        await one.send(job, Delta(0, "STALE", (2,)))

    async def go_on(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "l", (2,)))
        wakes.set()
        await soon(lambda: 1 in frozen.verdicts)
        await one.answer_rest(job)

    frozen = await worker(freeze, lease_ms=300)
    running = await gateway()
    stream = asyncio.create_task(running.stream())
    await soon(lambda: bool(frozen.verdicts))
    frozen.is_taking = False
    await worker(go_on)
    *chunks, done = kit.events(await stream)
    assert "Hello" == "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert [0, 1] == frozen.verdicts


async def test_flexible_requests_wait_for_the_others(gateway, worker, soon, redis, keys):
    """service_tier 'flex' is the batch class."""
    one = await worker(is_taking=False)
    running = await gateway()
    live = keys.queue(one.model).live
    answers = []
    for number, fields in enumerate([{"service_tier": "flex"}, {"service_tier": "auto"}, {}], 1):
        answers.append(asyncio.create_task(running.chat(**fields)))

        async def is_there(number=number):
            return await redis.hlen(live) == number

        await soon(is_there)
    one.is_taking = True
    await asyncio.gather(*answers)
    assert ["interactive", "interactive", "batch"] == [job.priority for job in one.jobs]


async def test_a_tenant_has_a_bound_of_its_own(gateway, worker, redis, keys, soon):
    """A tenant over its bound gets 429 and a time to wait; another one is served."""
    one = await worker(is_taking=False)
    running = await gateway(max_tenant_jobs=2)
    other = await gateway("other", max_tenant_jobs=2)
    waiting = [asyncio.create_task(running.chat()) for _ in range(2)]

    async def is_full():
        return await redis.hlen(keys.queue(one.model).live) == 2

    await soon(is_full)
    status, body, headers = await running.chat()
    assert (429, "queue_full") == (status, body["error"]["code"])
    assert 1 <= int(headers["Retry-After"]) <= 60
    waiting.append(asyncio.create_task(other.chat()))
    one.is_taking = True
    assert [200] * 3 == [result[0] for result in await asyncio.gather(*waiting)]


async def test_a_job_that_redis_lost_is_submitted_anew(gateway, worker, redis, keys, soon, monkeypatch):
    """As after a crash of a Redis that hadn't written its last second: the client waits a little longer."""
    monkeypatch.setattr("gateway.lease_watch.SILENT_S", 0.2)
    one = await worker(is_taking=False)
    running = await gateway()
    answer = asyncio.create_task(running.chat())

    async def is_there():
        return await redis.exists(keys.queue(one.model).live)

    await soon(is_there)
    await redis.delete(*keys.queue(one.model).all(), keys.line(one.model, "interactive/acme"))
    one.is_taking = True
    async with asyncio.timeout(10):
        assert 200 == (await answer)[0]
    assert [2] == [job.attempt for job in one.jobs]


@pytest.mark.parametrize("left", ["before", "meanwhile"])
async def test_a_lost_job_of_a_client_that_has_left_does_not_come_back(gateway, worker, redis, keys, soon, left):
    """Redis has lost a job, and while its gateway submits it anew its client leaves: nobody computes it, and nothing of it stays."""
    one = await worker(is_taking=False)
    running = await gateway()
    reader, submitter = running.parts.reader, running.parts.generations._submitter
    asking = asyncio.create_task(running.chat())
    live = keys.queue(one.model).live

    async def is_there():
        return await redis.exists(live)

    async def is_gone():
        return not await redis.exists(live)

    await soon(is_there)
    (job,) = reader.jobs()
    again, send = asyncio.Event(), submitter._send

    async def leave():
        asking.cancel()
        await soon(lambda: not reader.jobs() and not submitter._background)

    async def late(*arguments, force=False, **options):
        if left == "meanwhile":
            await leave()
        answer = await send(*arguments, force=force, **options)
        again.set()
        return answer

    submitter._send = late
    await redis.delete(*keys.queue(one.model).all(), keys.line(one.model, "interactive/acme"))
    if left == "before":
        reader.forget(job)
        reader.interrupted = {job}  # as in a round that had begun
        await soon(lambda: not reader.interrupted)
        assert not again.is_set()
        await leave()
    else:
        reader.interrupted.add(job)
        await soon(again.is_set)
    await soon(is_gone)
    await asyncio.sleep(0.3)
    assert await is_gone()


async def test_groups_and_scripts_that_are_gone_are_made_anew(gateway, worker, redis, keys, soon):
    """XGROUP DESTROY and SCRIPT FLUSH while jobs run and wait: all are answered, none twice."""
    go_on = asyncio.Event()

    async def wait(one, job):
        await go_on.wait()
        await one.answer(job, ["Hel", "lo"])

    one = await worker(wait)
    running = await gateway()
    answers = [asyncio.create_task(running.chat()) for _ in range(3)]
    await one.until(lambda: len(one.jobs) == 3)
    one.is_taking = False
    answers += [asyncio.create_task(running.chat()) for _ in range(3)]
    live = keys.queue(one.model).live

    async def is_there():
        return await redis.hlen(live) == 6

    await soon(is_there)
    await redis.xgroup_destroy(keys.line(one.model, "interactive/acme"), "workers")
    await redis.script_flush()
    one.is_taking = True
    go_on.set()
    assert [200] * 6 == [result[0] for result in await asyncio.gather(*answers)]
    assert 6 == len({job.request_id for job in one.jobs}) == len(one.jobs)


async def test_a_redis_that_is_full(gateway, worker, own_valkey, soon, capfd, kit):
    """New requests get 503 and a time to wait, the running stream ends well, and when there's room all is as before; one line for each change."""
    server = own_valkey()
    go_on = asyncio.Event()

    async def wait(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "Hel", (1,)))
        await go_on.wait()
        await one.answer_rest(job)

    await worker(wait, url=server.connection_url)
    running = await gateway(redis_url=server.connection_url)
    stream = asyncio.create_task(running.stream())
    await soon(lambda: any(job.completion_tokens for job in running.parts.reader.jobs()))
    async with Redis.from_url(server.connection_url) as client:
        await client.config_set("maxmemory", 1)
        for _ in range(3):
            status, body, headers = await running.chat()
            assert (503, "overloaded") == (status, body["error"]["code"])
            assert int(headers["Retry-After"]) >= 1
        assert 200 == (await running.get("/health/ready"))[0]
        go_on.set()
        *chunks, done = kit.events(await stream)
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        assert ("Hello", "[DONE]") == (text, done)
        await client.config_set("maxmemory", 0)
    assert 200 == (await running.chat())[0]
    logged = capfd.readouterr().out
    assert (1, 1) == (logged.count("redis_out_of_memory"), logged.count("redis_has_room_again"))


async def test_what_was_sent_into_the_silence_is_taken_back(gateway, worker, own_valkey, soon, keys):
    """Redis is silent while a request is submitted: 503 in time; when Redis comes back and takes the job after all, nobody computes it for long."""
    server = own_valkey()
    one = await worker(is_taking=False, url=server.connection_url)
    running = await gateway(redis_url=server.connection_url)
    async with Redis.from_url(server.connection_url, socket_timeout=None) as client:
        await client.execute_command("CLIENT", "PAUSE", 3500, "ALL")
        status, *_ = await running.chat()
        assert 503 == status

        async def is_empty():
            return not await client.exists(keys.queue(one.model).live)

        await running.parts.generations.close()
        await soon(is_empty, 15.0)
