"""Usage rows and sums: one row for each request whatever its end, with what was computed, and who may see it."""

import asyncio
import csv
import io
import json

import pytest

from protocol.ids import TenantId
from protocol.limits import Price
from protocol.replies import Delta, Done, Failed, Started

ACME = TenantId("acme")


async def _cached(one, job):
    await one.send(job, Started(one.worker_id))
    await asyncio.sleep(0.05)
    await one.send(job, Delta(0, "x", (1, 2), (), None))
    await asyncio.sleep(0.05)
    await one.send(job, Delta(0, "y", (3,), (), "stop"), Done(len(job.prompt_token_ids), 16, 3))


@pytest.fixture
def rows(usage_store, soon):
    """Waits for a number of rows and gives them."""

    async def wait(count, tenant=ACME):
        async def there():
            return len(await usage_store.rows(tenant, 0, 2**50, 100)) >= count

        await soon(there)
        found = await usage_store.rows(tenant, 0, 2**50, 100)
        assert count == len(found)
        return found

    return wait


async def test_a_row_tells_everything(gateway, worker, store, rows, price_store, kit):
    """Tenant, key, model, tokens, cost, times and outcome of a request that ended well."""
    await price_store.set(kit.model, Price(1000, 100, 2000))
    await worker(_cached)
    running = await gateway()
    usage = (await running.chat())[1]["usage"]
    (row,) = await rows(1)
    key = (await store.keys(ACME))[0]
    assert (ACME, key.id, kit.model, "completed", "", 1) == (
        row.tenant,
        row.key,
        row.model,
        row.outcome,
        row.code,
        row.samples,
    )
    assert (usage["prompt_tokens"], 16, 3) == (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    assert (usage["prompt_tokens"] - 16) * 1000 + 16 * 100 + 3 * 2000 == row.cost_nanos
    assert 0 <= row.queue_ms <= row.ttft_ms - 40 <= row.total_ms - 80
    assert abs(row.ended_ms - row.started_ms - row.total_ms) < 1000


@pytest.mark.parametrize(
    ("code", "outcome"), [("internal_error", "failed"), ("invalid_job", "failed"), ("deadline_exceeded", "failed"), ("cancelled", "cancelled")]
)  # fmt: skip
async def test_failed_requests_have_rows(gateway, worker, rows, code, outcome):
    """What was computed before the failure is in the row, and the code."""

    async def fail(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "x", (1, 2)), Failed(code, "because"))

    await worker(fail)
    running = await gateway()
    await running.chat()
    (row,) = await rows(1)
    assert (outcome, code if outcome == "failed" else "", 2) == (row.outcome, row.code, row.completion_tokens)


async def test_cancelled_requests_have_rows(gateway, worker, rows, soon):
    """A client that leaves before the worker starts pays nothing; later, for what was computed."""

    async def hold(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "x", (1, 2, 3), cached_tokens=4))
        await asyncio.Event().wait()

    one = await worker(hold)
    running = await gateway()
    task = asyncio.create_task(running.stream())
    await one.until(lambda: bool(one.jobs))
    await soon(lambda: any(job.completion_tokens for job in running.parts.reader.jobs()))
    task.cancel()
    (row,) = await rows(1)
    prompt = len(one.jobs[0].prompt_token_ids)
    assert ("cancelled", prompt, 4, 3) == (row.outcome, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    one.is_taking = False
    await asyncio.sleep(0.2)
    task = asyncio.create_task(running.stream())
    await soon(lambda: any(job.is_accepted for job in running.parts.reader.jobs()))
    task.cancel()
    second = (await rows(2))[1]
    assert ("cancelled", 0, 0, 0) == (second.outcome, second.prompt_tokens, second.completion_tokens, second.queue_ms)


async def test_refused_requests_have_none(gateway, worker, store, usage_store):
    """Bad fields, unknown models, limits: nothing was accepted, nothing is written."""
    await worker()
    running = await gateway()
    await running.chat(temperature=9)
    await running.chat(max_tokens=10**6)
    await running.post("/v1/chat/completions", {"model": "nope", "messages": []})
    await asyncio.sleep(0.3)
    assert [] == await usage_store.rows(ACME, 0, 2**50, 100)
    assert {0} == set((await store.usage(ACME)).values())


async def test_several_prompts_are_one_row(gateway, worker, rows, kit):
    """n x prompts are one request with the sum of their tokens."""
    await worker()
    running = await gateway()
    usage = (await running.post("/v1/completions", {"model": kit.model, "prompt": ["a", "bc"], "n": 3}))[1]["usage"]
    (row,) = await rows(1)
    assert (6, usage["prompt_tokens"], usage["completion_tokens"]) == (
        row.samples,
        row.prompt_tokens,
        row.completion_tokens,
    )


async def test_a_settlement_that_redis_missed_is_made_up_for(gateway, worker, rows, soon, keys):
    """Redis doesn't take the first attempts: the row comes all the same, once."""
    await worker()
    running = await gateway()
    commands = running.parts.link.fast
    real, failures = commands.evalsha, []

    async def failing(sha, num_keys, *arguments):
        if keys.usage_rows(ACME) in arguments and len(failures) < 3:
            failures.append(sha)
            if len(failures) == 2:
                await real(sha, num_keys, *arguments)  # carried out, but the answer got lost
            raise TimeoutError
        return await real(sha, num_keys, *arguments)

    commands.evalsha = failing
    await running.chat()
    await rows(1)
    await soon(lambda: len(failures) == 3)
    await asyncio.sleep(0.8)
    await rows(1)


async def test_the_tenants_own_usage(gateway, worker, rows, kit):
    """GET /v1/usage: by day, hour and request, as JSON and CSV; another tenant sees its own only."""
    await worker()
    acme, other = await gateway("acme"), await gateway("other")
    for _ in range(3):
        await acme.chat()
    await other.chat()
    await rows(3)
    await rows(1, TenantId("other"))

    async def usage(running, query=""):
        status, raw = await running.get(f"/v1/usage{query}", **running.headers())
        assert 200 == status, raw
        return kit.strict_json(raw)

    by_day, by_hour, by_request = [await usage(acme, f"?by={by}") for by in ("day", "hour", "request")]
    assert [3, 3, 3] == [body["totals"]["requests"] for body in (by_day, by_hour, by_request)]
    assert 3 == len(by_request["data"])
    assert {("acme", "completed")} == {(row["tenant"], row["outcome"]) for row in by_request["data"]}
    assert by_day["totals"] == by_hour["totals"] == by_request["totals"]
    assert by_day["data"][0]["start"].endswith("T00:00:00.000Z")
    assert 1 == (await usage(other))["totals"]["requests"]
    assert 2 == len((await usage(acme, "?by=request&limit=2"))["data"])
    assert [] == (await usage(acme, "?by=request&to=2020-01-01T00:00:00Z&from=2019-01-01"))["data"]
    status, raw = await acme.get("/v1/usage?by=request&format=csv", **acme.headers())
    table = list(csv.DictReader(io.StringIO(raw.decode())))
    assert [row["request"] for row in by_request["data"]] == [row["request"] for row in table]
    status, raw = await acme.get("/v1/usage?tenant=other", **acme.headers())
    assert (400, "tenant") == (status, json.loads(raw)["error"]["param"])


async def test_usage_of_all(gateway, worker, rows, kit):
    """The operator sees everybody, or one."""
    await worker()
    for name in ("acme", "other"):
        await (await gateway(name)).chat()
        await rows(1, TenantId(name))
    running = await gateway("third")
    for query, expected in (
        ("?by=request", {"acme", "other"}),
        ("?by=request&tenant=other", {"other"}),
        ("", {"acme", "other"}),
    ):
        raw = (await running.get(f"/admin/v1/usage{query}", Authorization=f"Bearer {kit.admin_key}"))[1]
        assert expected == {row["tenant"] for row in kit.strict_json(raw)["data"]}


async def test_rows_and_sums_do_not_live_for_ever(gateway, worker, rows, redis, keys):
    """All but the totals have a time to live."""
    await worker()
    running = await gateway()
    await running.chat()
    await rows(1)
    for name in [name async for name in redis.scan_iter(keys.account(ACME, "*"))]:
        is_lasting = name.decode() == keys.usage(ACME)
        assert (await redis.ttl(name) == -1) == is_lasting, name
