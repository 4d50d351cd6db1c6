"""Requests whose client or worker goes away: cancelled, failed in time, counted, and nothing left behind."""

import asyncio
import json
import random
import socket
import time

import pytest

from protocol.ids import TenantId
from protocol.replies import Delta, Done, Started

BODY = {"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}]}


async def _ask(running, **fields):
    """A request whose connection the test closes; returns its writer and reader."""
    body = json.dumps({**BODY, **fields}).encode()
    reader, writer = await asyncio.open_connection(running.host, running.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


@pytest.mark.parametrize("is_reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
async def test_disconnect_reaches_the_worker(gateway, worker, store, soon, stream, moment, is_reset):
    """A client that leaves while a worker is at it: the worker hears of it within a second, and what it computed is counted."""

    async def endless(one, job):
        await one.send(job, Started(one.worker_id))
        if moment == "decode":
            await one.send(job, Delta(0, "x", (1,)))
        await asyncio.Event().wait()

    one = await worker(endless)
    running = await gateway()
    _, writer = await _ask(running, stream=stream)
    await one.until(lambda: bool(one.jobs))
    await soon(lambda: any(job.worker_id for job in running.parts.reader.jobs()))
    if moment == "decode":
        await soon(lambda: any(job.completion_tokens for job in running.parts.reader.jobs()))
    if is_reset:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    started_s = time.monotonic()
    await one.until(lambda: one.cancelled == [one.jobs[0].request_id])
    assert time.monotonic() - started_s < 1.0

    async def is_counted():
        usage = await store.usage(TenantId("acme"))
        return (1, int(moment == "decode")) == (usage["requests"], usage["completion_tokens"])

    await soon(is_counted)
    assert ([], 0) == (running.parts.reader.jobs(), running.parts.generations.num_open)


async def test_disconnect_while_queued(gateway, worker, redis, keys, soon):
    """A client that leaves before any worker took its job takes the job off the queue."""
    one = await worker(is_taking=False)
    running = await gateway()
    _, writer = await _ask(running)

    async def length():
        return await redis.hlen(keys.queue(one.model).live)

    async def is_queued():
        return await length() == 1

    async def is_gone():
        return await length() == 0

    await soon(is_queued)
    writer.close()
    assert await soon(is_gone) < 1.0
    assert [] == one.jobs


async def test_many_disconnects_leave_nothing(gateway, worker, redis, keys, soon):
    """60 requests left at random moments: no job, no waiting entry and no connection in use remain, and the next request is fine."""

    async def slow(one, job):
        await one.answer(job, ["x"] * 5, pause_s=0.03)

    one = await worker(slow)
    running = await gateway(intake_processes=2)
    chance = random.Random(1)

    async def visit():
        _, writer = await _ask(running, stream=chance.random() < 0.5)
        await asyncio.sleep(chance.random() * 0.3)
        writer.close()

    await asyncio.gather(*(visit() for _ in range(60)))
    await soon(lambda: running.parts.generations.num_open == 0)

    async def is_empty():
        return await redis.hlen(keys.queue(one.model).live) == 0

    await soon(is_empty)
    assert (200, []) == ((await running.chat())[0], running.parts.reader.jobs())


async def test_a_broken_answer_stops_its_worker(gateway, worker):
    """When the gateway gives an answer up because part of it was lost, the worker is told to stop."""

    async def gap(one, job):
        await one.send(job, Started(one.worker_id))
        await one.send(job, Delta(0, "x", (1,)), sequence=5)
        await asyncio.Event().wait()

    one = await worker(gap)
    assert 500 == (await (await gateway()).chat())[0]
    await one.until(lambda: one.cancelled == [one.jobs[0].request_id])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_dead_worker(gateway, worker, kit, redis, keys, store, soon, stream):
    """When a running request's worker is no longer at it, another one goes on from what was delivered; the client sees nothing of it."""

    async def begin(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "Hel", (1, 2), cached_tokens=3))
        await asyncio.Event().wait()

    async def go_on(one, job):
        done = Done(len(job.prompt_token_ids), job.progress.cached_tokens, 3)
        await one.send(job, Started(one.worker_id), Delta(0, "lo", (3,), finish_reason="stop"), done)

    one = await worker(begin, lease_ms=300)
    running = await gateway()
    answer = asyncio.create_task(running.stream(stream_options={"include_usage": True}) if stream else running.chat())
    await soon(lambda: any(job.completion_tokens for job in running.parts.reader.jobs()))
    await one.stop()
    other = await worker(go_on)
    async with asyncio.timeout(5):
        result = await answer
    if stream:
        *chunks, usage, done = kit.events(result)
        texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert ("Hello", "[DONE]") == ("".join(texts), done)
        usage = usage["usage"]
    else:
        assert (200, "Hello") == (result[0], result[1]["choices"][0]["message"]["content"])
        usage = result[1]["usage"]
    assert (3, 3) == (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    (again,) = other.jobs
    assert (2, ((1, 2),)) == (again.attempt, tuple(sample.token_ids for sample in again.progress.samples))
    await running.parts.generations.close()
    assert not await redis.exists(keys.queue(one.model).live)
    assert 3 == (await store.usage(TenantId("acme")))["completion_tokens"]


async def test_no_worker(gateway, worker):
    """A model without workers is unknown; when its last worker goes between look-ups, the answer is a 503 with a time to wait."""
    one = await worker()
    running = await gateway()
    status, body, _ = await running.post("/v1/chat/completions", {**BODY, "model": "nobody/serves-this"})
    assert (404, "model_not_found", "model") == (status, body["error"]["code"], body["error"]["param"])
    await one.stop()
    await running.parts.link.commands.delete(one.keys.workers(one.model))
    status, body, headers = await running.chat()
    assert (status, body["error"]["code"]) in ((503, "model_unavailable"), (404, "model_not_found"))
    assert status == 404 or int(headers["Retry-After"]) > 0


async def test_a_full_queue(gateway, worker, redis, keys):
    """Over the limit of waiting jobs the answer is a 429 with Retry-After, and nothing that waits is dropped."""
    one = await worker(is_taking=False)
    running = await gateway(max_waiting_jobs=2)
    waiting = [asyncio.create_task(running.chat()) for _ in range(2)]
    while await redis.hlen(keys.queue(one.model).live) < 2:
        await asyncio.sleep(0.01)
    status, body, headers = await running.chat()
    assert (429, "rate_limit_error", True) == (status, body["error"]["type"], int(headers["Retry-After"]) >= 1)
    one.is_taking = True
    assert [200, 200] == [result[0] for result in await asyncio.gather(*waiting)]


async def test_a_deadline_that_the_worker_ignores(gateway, worker, monkeypatch):
    """A request's own time limit ends it even if its worker does not."""
    monkeypatch.setattr("gateway.liveness.DEADLINE_GRACE_S", 0.1)

    async def deaf(one, job):
        await one.send(job, Started(one.worker_id))
        await asyncio.Event().wait()

    one = await worker(deaf)
    status, body, _ = await (await gateway()).chat(timeout=0.3)
    assert (504, "deadline_exceeded") == (status, body["error"]["code"])
    await one.until(lambda: bool(one.cancelled))


async def test_a_client_that_does_not_read(gateway, worker):
    """Without progress for the limit's time the connection is cut and the worker stopped; others are served meanwhile."""

    async def flood(one, job):
        await one.send(job, Started(one.worker_id))
        for number in range(400):
            await one.send(job, Delta(0, "x" * 100_000, (number,)))
        await asyncio.Event().wait()

    one = await worker(flood)
    running = await gateway(slow_reader_s=0.5)
    _, writer = await _ask(running, stream=True)
    await one.until(lambda: bool(one.jobs))
    await one.until(lambda: one.cancelled == [one.jobs[0].request_id])
    one.script = lambda w, job: w.answer(job, ["ok"])
    assert 200 == (await running.chat())[0]
    writer.close()
