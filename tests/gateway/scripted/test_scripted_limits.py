"""Limits of tenants and keys at the front door: what is refused and how, what is taken, and that all of it comes back."""

import asyncio

import pytest

from protocol.ids import TenantId
from protocol.limits import NANOS, Budget, Limits, Price
from protocol.replies import Delta, Done, Failed, Started

ACME = TenantId("acme")
MINUTE_S = 61


async def _hold(one, job):
    """Begins and never ends."""
    await one.send(job, Started(one.worker_id), Delta(0, "x", (1,)))
    await asyncio.Event().wait()


@pytest.mark.parametrize("owner", ["tenant", "key"])
async def test_requests_per_minute(gateway, worker, store, owner):
    """As many as allowed, then 429 that says when to come back; a refused request is not counted, neither is one that's invalid."""
    await worker()
    running = await gateway()
    await _limit(store, owner, Limits(requests_per_minute=3))
    remaining = []
    for _ in range(3):
        status, _, headers = await running.chat()
        assert (200, "3") == (status, headers["x-ratelimit-limit-requests"])
        assert 0 < int(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= MINUTE_S
        remaining.append(headers["x-ratelimit-remaining-requests"])
        assert 400 == (await running.chat(temperature=9))[0]
    assert ["2", "1", "0"] == remaining
    for _ in range(5):
        status, body, headers = await running.chat()
        assert (429, "rate_limit_exceeded", "rate_limit_error") == (
            status,
            body["error"]["code"],
            body["error"]["type"],
        )
        assert 1 <= int(headers["Retry-After"]) <= MINUTE_S
        assert ("0", None) == (headers["x-ratelimit-remaining-requests"], headers.get("x-should-retry"))
    other = await gateway("other")
    assert 200 == (await other.chat())[0]


async def test_tokens_are_reserved_and_settled(gateway, worker, store, soon):
    """What a request may use at most is taken at once; what it didn't use comes back at its end."""
    one = await worker()
    running = await gateway()
    num_prompt = (await running.chat())[1]["usage"]["prompt_tokens"]
    await store.change_tenant(ACME, limits=Limits(tokens_per_minute=1000))
    await asyncio.sleep(0.6)
    one.script = _hold
    holding = asyncio.create_task(running.chat(max_tokens=500))
    await one.until(lambda: len(one.jobs) == 2)
    status, _, headers = await running.chat(max_tokens=500)
    assert (429, str(500 - num_prompt)) == (status, headers["x-ratelimit-remaining-tokens"])
    one.script = lambda w, job: w.answer(job, ["a", "b"])
    status, _, headers = await running.chat(max_tokens=100)
    assert (200, str(400 - 2 * num_prompt)) == (status, headers["x-ratelimit-remaining-tokens"])
    holding.cancel()

    async def is_back():
        return (await running.chat(max_tokens=800))[0] == 200

    # The cancelled one keeps its prompt and the one token that it had; the others what they really used.
    await soon(is_back)


async def test_what_can_never_fit_is_not_to_be_tried_again(gateway, worker, store):
    """A request that alone is over the limit: no Retry-After, and the client is told not to try."""
    await worker()
    running = await gateway()
    await store.change_tenant(ACME, limits=Limits(tokens_per_minute=50))
    status, body, headers = await running.chat(max_tokens=100)
    assert (429, "false", None) == (status, headers["x-should-retry"], headers.get("Retry-After"))
    assert "asks for" in body["error"]["message"]


async def test_streams_carry_the_headers(gateway, worker, store, kit):
    """A stream's head tells where the client stands, as a whole answer does."""
    await worker()
    running = await gateway()
    await store.change_tenant(ACME, limits=Limits(requests_per_minute=5, tokens_per_minute=5000))
    await asyncio.sleep(0.6)
    body = {"model": kit.model, "stream": True, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10}
    async with running.client.post(
        running.url + "/v1/chat/completions", json=body, headers=running.headers()
    ) as response:
        found = {name for name in response.headers if name.startswith("x-ratelimit-")}
        await response.read()
    assert {f"x-ratelimit-{a}-{b}" for a in ("limit", "remaining", "reset") for b in ("requests", "tokens")} == found


async def test_samples_count_as_tokens(gateway, worker, store):
    """n samples reserve n times max_tokens, the prompt once."""
    await worker()
    running = await gateway()
    num_prompt = (await running.chat())[1]["usage"]["prompt_tokens"]
    await store.change_tenant(ACME, limits=Limits(tokens_per_minute=300))
    await asyncio.sleep(0.6)
    headers = (await running.chat(max_tokens=50, n=3))[2]
    assert str(300 - num_prompt - 150) == headers["x-ratelimit-remaining-tokens"]
    assert 429 == (await running.chat(max_tokens=100, n=3))[0]


@pytest.mark.parametrize("owner", ["tenant", "key"])
@pytest.mark.parametrize(
    "ending", ["done", "client leaves", "stream cut", "error before", "error in stream", "invalid job", "deadline"]
)
async def test_every_end_gives_the_slot_back(gateway, worker, store, soon, owner, ending):
    """After each way of ending a request, three times, as many can run at once as before, and no more."""
    one = await worker()
    running = await gateway()
    await _limit(store, owner, Limits(concurrent_requests=2))
    await asyncio.sleep(0.6)
    for _ in range(3):
        await _end(running, one, ending)
    one.script = _hold

    async def both_run():
        tasks = [asyncio.create_task(running.stream()) for _ in range(2)]
        before = len(one.jobs)
        await asyncio.wait(tasks, timeout=0.5)
        is_full = len(one.jobs) - before == 2 and 429 == (await running.chat())[0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return is_full

    assert await soon(both_run, 10.0) < running.parts.settings.lease_s


async def _end(running, one, ending):
    async def fail(w, job, code, after):
        await w.send(job, Started(w.worker_id))
        if after:
            await w.send(job, Delta(0, "x", (1,)))
        await w.send(job, Failed(code, "because"))

    scripts = {
        "done": lambda w, job: w.answer(job, ["ok"]),
        "error before": lambda w, job: fail(w, job, "internal_error", after=False),
        "error in stream": lambda w, job: fail(w, job, "internal_error", after=True),
        "invalid job": lambda w, job: fail(w, job, "invalid_job", after=False),
        "deadline": lambda w, job: fail(w, job, "deadline_exceeded", after=True),
    }
    one.script = scripts.get(ending, _hold)
    before = len(one.jobs)
    if ending in ("client leaves", "stream cut"):
        task = asyncio.create_task(running.stream() if ending == "stream cut" else running.chat())
        await one.until(lambda: len(one.jobs) > before)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif ending == "error in stream":
        assert b'"error"' in await running.stream()
    else:
        status = (await running.chat())[0]
        assert {"done": 200, "invalid job": 400, "deadline": 504}.get(ending, 500) == status


async def test_a_lost_worker_gives_the_slot_back(gateway, worker, store, soon):
    """The worker dies in the middle of three answers, another one goes on with them; then others can be asked for. Three times."""
    await store.create_tenant(ACME, "Acme", limits=Limits(concurrent_requests=3))
    one = await worker(_hold, lease_ms=2000)
    running = await gateway()
    for _ in range(3):
        two = await _lose(running, one, worker, soon)
        await two.stop()
        one = await worker(_hold, lease_ms=2000)


async def _lose(running, one, worker, soon):
    """One worker lost with all slots in use; gives the one that went on, when as many requests can run at once as before."""

    async def go_on(two, job):
        done = Done(len(job.prompt_token_ids), 0, 2)
        await two.send(job, Started(two.worker_id), Delta(0, "y", (2,), finish_reason="stop"), done)

    streams = [asyncio.create_task(running.stream()) for _ in range(3)]
    await one.until(lambda: len(one.jobs) == 3)
    await soon(lambda: all(job.completion_tokens for job in running.parts.reader.jobs()))
    assert 429 == (await running.chat())[0]
    await one.stop()
    two = await worker(go_on)
    assert all(raw.endswith(b"data: [DONE]\n\n") for raw in await asyncio.gather(*streams))
    two.script = lambda w, job: w.answer(job, ["ok"])

    async def is_well():
        return [200] * 3 == [status for status, _, _ in await asyncio.gather(*(running.chat() for _ in range(3)))]

    assert await soon(is_well, 10.0) < running.parts.settings.lease_s
    return two


async def test_an_interrupted_admission_takes_nothing(gateway, worker, store, soon, redis, keys):
    """Clients that leave at any moment of being admitted leave nothing behind."""
    await store.create_tenant(
        ACME, "Acme", limits=Limits(concurrent_requests=100, queued_jobs=100), budgets=(Budget("day", "tokens", 10**9),)
    )
    await worker()
    running = await gateway()
    for delay_ms in range(0, 40, 2):
        task = asyncio.create_task(running.chat())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def is_empty():
        left = [await redis.hlen(keys.open_requests(ACME)), await redis.zcard(keys.leases(ACME))]
        left += [await redis.zcard(keys.account(ACME, f"tenant:{what}")) for what in ("concurrent", "queued")]
        return left == [0, 0, 0, 0]

    await soon(is_empty)
    rows = await redis.xrange(keys.usage_rows(ACME))
    used = sum(int(row[b"prompt_tokens"]) + int(row[b"completion_tokens"]) for _, row in rows)
    assert used == int(await redis.hget(keys.account(ACME, "tenant:budget:day:tokens"), "used") or 0)


async def test_queued_jobs(gateway, worker, store, soon, redis, keys):
    """Jobs that no worker has taken count; those that run don't, and a request of many prompts counts as many."""
    await store.create_tenant(ACME, "Acme", limits=Limits(queued_jobs=2))
    one = await worker(_hold, is_taking=False)
    running = await gateway()
    tasks = [asyncio.create_task(running.chat()) for _ in range(2)]

    async def both_wait():
        return await redis.zcard(keys.account(ACME, "tenant:queued")) == 2

    await soon(both_wait)
    async with asyncio.timeout(5):
        assert 429 == (await running.chat())[0]
    one.is_taking = True
    await one.until(lambda: len(one.jobs) == 2)
    one.is_taking = False
    await asyncio.sleep(0.2)  # the worker's look at the queue that has begun

    async def two_more():
        task = asyncio.create_task(running.post("/v1/completions", {"model": one.model, "prompt": ["a", "b"]}))
        done, _ = await asyncio.wait([task], timeout=0.2)
        tasks.append(task)
        return not done

    await soon(two_more)
    status, body, headers = await running.post("/v1/completions", {"model": one.model, "prompt": ["a", "b", "c"]})
    assert (429, "false") == (status, headers["x-should-retry"])
    async with asyncio.timeout(5):
        assert 429 == (await running.chat())[0]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_context_output_and_samples(gateway, worker, store):
    """What one request may be: the narrower of tenant's and key's bounds, named in the error; an answer without max_tokens is cut there."""
    one = await worker()
    running = await gateway()
    await store.change_tenant(ACME, limits=Limits(context_tokens=100, output_tokens=40, samples=4))
    key = (await store.keys(ACME))[0]
    await store.change_key(key.id, limits=Limits(context_tokens=80, output_tokens=60, samples=3))
    await asyncio.sleep(0.6)
    assert 200 == (await running.chat())[0]
    assert 40 == one.jobs[-1].sampling.max_tokens
    for fields, param in ((({"max_tokens": 41}), "max_tokens"), ({"content": "x" * 200}, "messages"), ({"n": 4}, "n")):
        status, body, _ = await running.chat(**fields)
        assert (400, param) == (status, body["error"]["param"]), fields
    assert "maximum context length is 80 tokens" in (await running.chat("x" * 200))[1]["error"]["message"]
    status, body, _ = await running.post("/v1/completions", {"model": one.model, "prompt": ["a"] * 4})
    assert (400, "prompt") == (status, body["error"]["param"])


@pytest.mark.parametrize("unit", ["tokens", "money"])
async def test_budgets(gateway, worker, store, soon, unit, price_store, kit):
    """A budget is taken from as requests end; what would exceed it is refused until the period is over, and need not be tried again."""
    await worker(
        lambda w, job: w.send(job, Started(w.worker_id), Delta(0, "x", (1,) * 10, (), "stop"), Done(100, 60, 10))
    )
    running = await gateway()
    # 40 fresh, 60 cached and 10 generated tokens: 40 + 30 + 20 = 90 nano-units.
    await price_store.set(kit.model, Price(1, 0, 2) if unit == "tokens" else Price(2, 1, 2))
    amount = 110 * 3 + 150 if unit == "tokens" else (40 * 2 + 60 + 20) * 3 + 300
    await store.change_tenant(ACME, budgets=(Budget("month", unit, amount),))
    await asyncio.sleep(0.6)
    for _ in range(3):
        assert 200 == (await running.chat(max_tokens=100))[0]

    async def is_settled():
        return (await store.usage(ACME))["requests"] == 3

    await soon(is_settled)
    status, body, headers = await running.chat(max_tokens=200)
    assert (429, "insufficient_quota", "false") == (status, body["error"]["code"], headers["x-should-retry"])
    assert "month" in body["error"]["message"]
    assert 200 == (await running.chat(max_tokens=50))[0]


async def test_money_is_exact(gateway, worker, store, soon, price_store, kit, usage_store):
    """A row's cost is the price of the moment of admission: fresh and cached input, output."""
    await worker(
        lambda w, job: w.send(job, Started(w.worker_id), Delta(0, "x", (1,) * 10, (), "stop"), Done(100, 60, 10))
    )
    running = await gateway()
    await price_store.set(kit.model, Price(1000, 500, 4000))
    await asyncio.sleep(0.4)
    await running.chat()

    async def rows():
        return await usage_store.rows(ACME, 0, 2**50, 10)

    await soon(rows)
    assert 40 * 1000 + 60 * 500 + 10 * 4000 == (await rows())[0].cost_nanos
    assert NANOS == 10**9


async def test_a_full_queue_charges_nothing(gateway, worker, store, redis, keys, soon):
    """A request that is admitted but finds the model's queue full gets everything back and has no row."""
    await store.create_tenant(ACME, "Acme", limits=Limits(requests_per_minute=5))
    one = await worker(is_taking=False)
    running = await gateway(max_waiting_jobs=1)
    waiting = asyncio.create_task(running.chat())

    async def is_queued():
        return await redis.hlen(keys.queue(one.model).live) == 1

    await soon(is_queued)
    codes = {(await running.chat())[1]["error"]["code"] for _ in range(10)}
    assert {"queue_full"} == codes
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    one.is_taking = True

    async def all_but_one():
        return await redis.hget(keys.account(ACME, "tenant:requests"), "sum") == b"1"

    async def has_a_row():
        return await redis.xlen(keys.usage_rows(ACME)) == 1

    await soon(all_but_one)
    await soon(has_a_row)  # of the one that was cancelled


async def test_redis_lost_the_accounts(gateway, worker, store, redis, keys, soon):
    """Accounts that vanish while a request runs are no trouble: it ends, and nothing is written twice or left."""
    one = await worker(_hold)
    running = await gateway()
    task = asyncio.create_task(running.stream())
    await one.until(lambda: bool(one.jobs))
    await redis.delete(keys.open_requests(ACME), keys.leases(ACME))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await soon(lambda: not running.parts.generations._ledger.open)
    assert 0 == await redis.xlen(keys.usage_rows(ACME))
    one.script = lambda w, job: w.answer(job, ["ok"])
    assert 200 == (await running.chat())[0]


async def _limit(store, owner, limits):
    if owner == "tenant":
        await store.change_tenant(ACME, limits=limits)
    else:
        await store.change_key((await store.keys(ACME))[0].id, limits=limits)
    await asyncio.sleep(0.6)
