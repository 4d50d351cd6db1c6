"""Who may do what, whose request is whose, and what must never be seen anywhere."""

import asyncio

import pytest

from protocol.ids import TenantId

CANARY_KEY = "sk-sg-CANARYKEYCANARYKEYCANARYKEY"
CANARY_PROMPT = "CANARYPROMPT"


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": CANARY_KEY}, {"Authorization": f"Basic {CANARY_KEY}"}, {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {CANARY_KEY}"}, {"Authorization": "Bearer é" + CANARY_KEY}, {"X-Api-Key": CANARY_KEY},
        {"Authorization": "Bearer " + "x" * 4000}, {"Authorization": "Bearer a b"},
    ],
    ids=range(9),
)  # fmt: skip
async def test_one_answer_for_every_bad_key(gateway, worker, kit, headers):
    """Missing, malformed and unknown keys get the same 401, on every route that needs one."""
    await worker()
    running = await gateway()
    bodies = set()
    for path in ("/v1/models", "/v1/models/x", "/admin/v1/workers"):
        status, body = await running.get(path, **headers)
        bodies.add((status, body))
    for path in ("/v1/chat/completions", "/v1/completions"):
        async with running.client.post(running.url + path, data=b"{", headers=headers) as response:
            bodies.add((response.status, await response.read()))
    assert [(401, "invalid_api_key")] == [(status, kit.strict_json(raw)["error"]["code"]) for status, raw in bodies]


async def test_a_key_in_the_query_is_no_key(gateway, worker):
    """Keys in URLs would end up in logs; they open nothing."""
    await worker()
    running = await gateway()
    assert 401 == (await running.get(f"/v1/models?api_key={running.key}"))[0]


async def test_the_body_is_not_read_before_the_key(gateway, worker):
    """Without a key the answer comes before the body does."""
    await worker()
    running = await gateway()
    reader, writer = await asyncio.open_connection(running.host, running.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_a_revoked_key_is_refused_within_a_second(gateway, worker, store, soon):
    """Revocation and deletion of the tenant reach a gateway that knows the key, and the answer is that for an unknown key."""
    await worker()
    running = await gateway()
    assert 200 == (await running.chat())[0]
    unknown = await running.get("/v1/models", Authorization=f"Bearer {CANARY_KEY}")
    await store.revoke_key((await store.keys(TenantId("acme")))[0].id)

    async def is_refused():
        return await running.get("/v1/models", **running.headers()) == unknown

    assert await soon(is_refused) < 1.0


async def test_admin(gateway, worker, store, kit):
    """Workers are shown to the admin key and to keys of the admin role, not to a tenant's key."""
    one = await worker()
    running = await gateway()
    role_key = (await store.create_key(TenantId("acme"), "ops", "admin")).secret
    assert 403 == (await running.get("/admin/v1/workers", **running.headers()))[0]
    for key in (kit.admin_key, role_key):
        status, raw = await running.get("/admin/v1/workers", Authorization=f"Bearer {key}")
        assert (200, [one.worker_id]) == (status, [row["worker_id"] for row in kit.strict_json(raw)["data"]])


async def test_request_ids_are_only_names(gateway, worker):
    """Two tenants with one X-Request-Id, at once: each gets its own text, and one leaving does not touch the other."""

    async def repeat_tenant(one, job):
        await one.answer(job, [job.tenant] * 5, pause_s=0.05)

    one = await worker(repeat_tenant)
    acme, other = await gateway("acme"), await gateway("other")
    same = {"X-Request-Id": "same", "Content-Type": "application/json"}
    body = {"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}]}
    tasks = [
        asyncio.create_task(running.post("/v1/chat/completions", body, headers=running.headers(**same)))
        for running in (acme, other)
    ]
    await one.until(lambda: len(one.jobs) == 2)
    tasks[0].cancel()
    status, answer, headers = await tasks[1]
    assert (200, "other" * 5, "same") == (status, answer["choices"][0]["message"]["content"], headers["x-request-id"])
    assert not {"same"} & {job.request_id for job in one.jobs}


@pytest.mark.parametrize("given", ["x" * 65, "a:b", "*", "../x", "é", "", "a b", "x" * 5000])
async def test_request_ids_are_cleaned(gateway, worker, given):
    """A request id that is long or holds anything unusual is replaced."""
    await worker()
    running = await gateway()
    async with running.client.get(
        running.url + "/v1/models", headers=running.headers(**{"X-Request-Id": given})
    ) as response:
        assert (200, "req_") == (response.status, response.headers["x-request-id"][:4])


async def test_nothing_secret_is_seen_anywhere(gateway, worker, kit, redis, keys, capfd):
    """Keys and prompts are in no log, metric, error or Redis value, whatever goes wrong with the request."""
    await worker()
    running = await gateway()
    good = running.headers(**{"Content-Type": "application/json"})
    seen = []
    for headers in (
        {"Authorization": f"Bearer {CANARY_KEY}"}, {"Authorization": f"Basic {CANARY_KEY}"}, {"X-Api-Key": CANARY_KEY}, good,
    ):  # fmt: skip
        for fields in (
            {},
            {"temperature": 9},
            {"stop": [5]},
            {"n": 0},
            {"messages": [{"role": "x", "content": CANARY_PROMPT}]},
        ):
            body = {
                "model": kit.model,
                "messages": [{"role": "user", "content": CANARY_PROMPT}],
                "api_key": CANARY_KEY,
                **fields,
            }
            seen.append((await running.post("/v1/chat/completions", body, headers=headers))[1])
        path = f"/v1/chat/completions?api_key={CANARY_KEY}"
        seen.append((await running.post(path, f'{{"{CANARY_PROMPT}'.encode(), headers=headers))[1])
    seen.append((await running.get(f"/nowhere/{CANARY_KEY}?key={CANARY_KEY}"))[1])
    seen.append((await running.get("/metrics", Authorization=f"Bearer {kit.admin_key}"))[1])
    async for key in redis.scan_iter(keys.prefix + "*"):
        seen.append((key, await redis.dump(key)))
    captured = capfd.readouterr()
    everything = repr(seen) + captured.out + captured.err
    for secret in (CANARY_KEY, CANARY_PROMPT, running.key):
        assert secret not in everything
    assert "http_request" in captured.out + captured.err


async def test_metrics_have_no_tenants(gateway, worker, kit):
    """Metrics count by route and status and show the workers' gauges; never a tenant, never a path that a client made up."""
    one = await worker()
    running = await gateway()
    await running.chat()
    await running.get("/made/up/path")
    text = (await running.get("/metrics", Authorization=f"Bearer {kit.admin_key}"))[1].decode()
    assert 'sluicegate_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'sluicegate_http_requests_total{route="unmatched",status="404"} 1.0' in text
    assert f'sluicegate_worker_pages{{model="tiny/chat",state="free",worker="{one.worker_id}"}} 60.0' in text
    assert 'sluicegate_time_to_first_token_seconds_count{model="tiny/chat"} 1.0' in text
    assert "acme" not in text
    assert "made" not in text


async def test_usage_is_counted_once(gateway, worker, store, soon):
    """Complete, streamed and refused requests: totals hold exactly what was computed."""
    await worker()
    running = await gateway()
    prompt_tokens = (await running.chat(n=2))[1]["usage"]["prompt_tokens"]
    await running.stream()
    await running.chat(temperature=9)

    async def is_written():
        return (await store.usage(TenantId("acme")))["requests"] == 2

    await soon(is_written)
    assert {
        "requests": 2,
        "prompt_tokens": 2 * prompt_tokens,
        "cached_tokens": 0,
        "completion_tokens": 6,
    } == await store.usage(TenantId("acme"))
