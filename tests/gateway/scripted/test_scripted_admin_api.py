"""The operator's API: what it makes, changes, refuses and tells, and the audit of it all."""

import asyncio
import json

import pytest

from protocol.ids import TenantId

ACME = TenantId("acme")


@pytest.fixture
def desk(gateway, worker, kit):
    """A gateway, and a function `(method, path, body) -> (status, JSON)` with the operator's key."""

    async def start():
        await worker()
        running = await gateway()

        async def ask(method, path, body=None, key=kit.admin_key):
            headers = {"Authorization": f"Bearer {key}"}
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            if data is not None:
                headers["Content-Type"] = "application/json"
            async with running.client.request(
                method, f"{running.url}/admin/v1/{path}", data=data, headers=headers
            ) as response:
                return response.status, kit.strict_json(await response.read())

        return running, ask

    return start


async def test_the_life_of_a_tenant(desk):
    """Made, shown, changed, disabled, deleted; limits are merged by PATCH and replaced by PUT."""
    _, ask = await desk()
    wanted = {
        "id": "big", "display_name": "Big Co.", "weight": 2.5, "models": ["tiny/chat"], "metadata": {"team": "ø"},
        "limits": {"requests_per_minute": 5, "samples": 2},
        "budgets": [{"period": "month", "unit": "money", "amount": 12.5}, {"period": "day", "unit": "tokens", "amount": 1000}],
    }  # fmt: skip
    status, made = await ask("POST", "tenants", wanted)
    assert 201 == status
    shown = (await ask("GET", "tenants/big"))[1]
    assert made == shown
    for name in ("id", "display_name", "weight", "models", "metadata", "budgets"):
        assert wanted[name] == shown[name]
    assert (5, 2, None) == tuple(shown["limits"][name] for name in ("requests_per_minute", "samples", "context_tokens"))
    changed = (await ask("PATCH", "tenants/big", {"limits": {"samples": None, "queued_jobs": 7}, "models": None}))[1]
    assert (5, None, 7) == tuple(changed["limits"][name] for name in ("requests_per_minute", "samples", "queued_jobs"))
    assert changed["models"] is None
    replaced = (await ask("PUT", "tenants/big/limits", {"samples": 3}))[1]["limits"]
    assert {"samples": 3} == {name: value for name, value in replaced.items() if value is not None}
    assert "disabled" == (await ask("PATCH", "tenants/big", {"status": "disabled"}))[1]["status"]
    assert ["acme", "big"] == [row["id"] for row in (await ask("GET", "tenants"))[1]["data"]]
    assert 409 == (await ask("POST", "tenants", wanted))[0]
    assert (200, True) == ((answer := await ask("DELETE", "tenants/big"))[0], answer[1]["deleted"])
    assert 404 == (await ask("DELETE", "tenants/big"))[0]
    for path in ("tenants/big", "tenants/big/limits", "tenants/big/keys"):
        assert 404 == (await ask("GET", path))[0], path


@pytest.mark.parametrize("query", ["kinds=key", "by=day", "kind=key&kind=tenant", "limit=0"])
async def test_the_audit_refuses_what_it_does_not_know(desk, query):
    """An unknown parameter, or one that is there twice, is not passed over."""
    _, ask = await desk()
    status, answer = await ask("GET", f"audit?{query}")
    assert (400, query.partition("=")[0]) == (status, answer["error"]["param"])


async def test_the_life_of_a_key(desk, store):
    """The secret is shown once; the key is listed without it, rotated and revoked."""
    running, ask = await desk()
    fields = {
        "name": "ci",
        "scopes": ["inference", "usage"],
        "expires": "2099-01-01T00:00:00Z",
        "limits": {"samples": 1},
    }
    status, made = await ask("POST", "tenants/acme/keys", fields)
    assert (201, "2099-01-01T00:00:00.000Z") == (status, made["expires"])
    assert 200 == (await running.get("/v1/models", Authorization=f"Bearer {made['secret']}"))[0]
    listed = (await ask("GET", "tenants/acme/keys"))[1]["data"]
    assert {"ci", "test"} == {row["name"] for row in listed}
    assert made["secret"] not in json.dumps(listed)
    key_id = made["id"]
    assert {**made, "last_used": listed[1]["last_used"]} == {
        **(await ask("GET", f"keys/{key_id}"))[1],
        "secret": made["secret"],
    }
    assert "other" == (await ask("PATCH", f"keys/{key_id}", {"name": "other"}))[1]["name"]
    status, next_key = await ask("POST", f"keys/{key_id}/rotate", {"overlap_s": 60})
    assert (201, ["inference", "usage"], 1) == (status, next_key["scopes"], next_key["limits"]["samples"])
    assert (await ask("GET", f"keys/{key_id}"))[1]["expires"] < "2099"
    assert 200 == (await ask("DELETE", f"keys/{key_id}"))[0]
    assert 404 == (await ask("DELETE", f"keys/{key_id}"))[0]
    assert await store.find_key(made["secret"]) is None
    assert 201 == (await ask("POST", "tenants/acme/keys"))[0]


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "tenants", {}, "id"), ("POST", "tenants", {"id": 5}, "id"), ("POST", "tenants", {"id": "a{b}"}, None),
        ("POST", "tenants", {"id": "x", "nme": 1}, "nme"), ("POST", "tenants", {"id": "x", "weight": "1"}, "weight"),
        ("POST", "tenants", {"id": "x", "weight": 0}, None), ("POST", "tenants", {"id": "x", "weight": True}, "weight"),
        ("POST", "tenants", {"id": "x", "limits": []}, "limits"),
        ("POST", "tenants", {"id": "x", "limits": {"rpm": 1}}, "limits.rpm"),
        ("POST", "tenants", {"id": "x", "limits": {"samples": 0}}, "limits.samples"),
        ("POST", "tenants", {"id": "x", "limits": {"samples": 1.5}}, "limits.samples"),
        ("POST", "tenants", {"id": "x", "limits": {"samples": True}}, "limits.samples"),
        ("POST", "tenants", {"id": "x", "limits": {"samples": 2**60}}, "limits.samples"),
        ("POST", "tenants", {"id": "x", "budgets": {}}, "budgets"),
        ("POST", "tenants", {"id": "x", "budgets": [{"period": "week", "unit": "tokens", "amount": 1}]}, "budgets[0].period"),
        ("POST", "tenants", {"id": "x", "budgets": [{"period": "day", "unit": "eur", "amount": 1}]}, "budgets[0].unit"),
        ("POST", "tenants", {"id": "x", "budgets": [{"period": "day", "unit": "tokens", "amount": 0.5}]}, "budgets[0].amount"),
        ("POST", "tenants", {"id": "x", "budgets": [{"period": "day", "unit": "tokens", "amount": 1}] * 2}, "budgets"),
        ("POST", "tenants", {"id": "x", "models": "all"}, "models"), ("POST", "tenants", {"id": "x", "models": ["a b"]}, "models"),
        ("POST", "tenants", {"id": "x", "metadata": {"a": 1}}, "metadata.a"),
        ("POST", "tenants", {"id": "x", "display_name": "a\nb"}, "display_name"),
        ("POST", "tenants", {"id": "x", "display_name": "x" * 600}, "display_name"),
        ("POST", "tenants", {"id": "x", "status": "gone"}, "status"), ("POST", "tenants", b"[]", None), ("POST", "tenants", b"{", None),
        ("POST", "tenants", b'{"id": "x", "display_name": "\\ud800"}', "display_name"),
        ("POST", "tenants", b'{"id": "x", "weight": NaN}', "weight"), ("POST", "tenants", b'{"id": "x", "weight": 1e999}', "weight"),
        ("POST", "tenants", {"id": "x", "weight": 10**400}, "weight"),
        ("POST", "tenants", {"id": "x", "budgets": [{"period": "day", "unit": "money", "amount": 1e300}]}, "budgets[0].amount"),
        ("POST", "tenants", {"id": "x", "budgets": [{"period": "day", "unit": "tokens", "amount": 10**400}]}, "budgets[0].amount"),
        ("POST", "tenants/acme/keys", {"expires": 1e308}, "expires"), ("POST", "tenants/acme/keys", {"expires": 10**400}, "expires"),
        ("POST", "keys/key_0/rotate", {"overlap_s": 10**400}, "overlap_s"), ("PUT", "prices/m", {"input": 10**400, "output": 1}, "input"),
        ("POST", "tenants/acme/keys", {"scopes": []}, "scopes"), ("POST", "tenants/acme/keys", {"scopes": ["root"]}, "scopes"),
        ("POST", "tenants/acme/keys", {"scopes": [[]]}, "scopes"),
        ("POST", "tenants/acme/keys", {"expires": "soon"}, "expires"), ("POST", "tenants/acme/keys", {"expires": 1e300}, "expires"),
        ("POST", "tenants/acme/keys", {"expires": True}, "expires"),
        ("PUT", "prices/tiny/chat", {"input": 1}, "output"), ("PUT", "prices/tiny/chat", {"input": -1, "output": 1}, "input"),
        ("PUT", "prices/a b", {"input": 1, "output": 1}, None),
        ("POST", "shares", {"name": "s", "tenants": ["acme"]}, None), ("POST", "shares", {"name": "s", "tenants": "acme"}, "tenants"),
        ("POST", "shares", {"name": "a/b", "tenants": ["acme", "acme"]}, None),
        ("GET", "usage?by=week", None, "by"), ("GET", "usage?from=soon", None, "from"), ("GET", "usage?from=5&to=4", None, "from"),
        ("GET", "usage?by=hour&from=0", None, "from"), ("GET", "usage?limit=0", None, "limit"), ("GET", "usage?format=xml", None, "format"),
        ("GET", "usage?tenants=acme", None, "tenants"), ("GET", "usage?tenant=a%20b", None, None),
        ("GET", "audit?limit=x", None, "limit"),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
async def test_what_cannot_be_is_a_400_that_names_the_field(desk, method, path, body, param):
    """Wrong types, names and ranges; nothing is made."""
    _, ask = await desk()
    status, answer = await ask(method, path, body)
    assert (400, "invalid_request_error", param) == (status, answer["error"]["type"], answer["error"]["param"]), answer
    assert ["acme"] == [row["id"] for row in (await ask("GET", "tenants"))[1]["data"]]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "tenants"), ("POST", "tenants"), ("GET", "tenants/acme"), ("PATCH", "tenants/acme"), ("DELETE", "tenants/acme"),
        ("GET", "tenants/acme/limits"), ("PUT", "tenants/acme/limits"), ("GET", "tenants/acme/keys"), ("POST", "tenants/acme/keys"),
        ("GET", "keys"), ("GET", "keys/k"), ("PATCH", "keys/k"), ("POST", "keys/k/rotate"), ("DELETE", "keys/k"), ("GET", "prices"),
        ("PUT", "prices/m"), ("DELETE", "prices/m"), ("GET", "shares"), ("POST", "shares"), ("DELETE", "shares/s"), ("GET", "usage"),
        ("GET", "queue"), ("GET", "audit"), ("GET", "workers"),
    ],
)  # fmt: skip
async def test_only_operators(desk, method, path):
    """No key and an unknown key: 401; a tenant's key: 403. Whatever the route."""
    running, ask = await desk()
    assert 401 == (await ask(method, path, key="sk-sg-unknown-key"))[0]
    assert 403 == (await ask(method, path, {}, key=running.key))[0]


async def test_a_large_body_is_refused(desk):
    """The admin API has a limit of its own."""
    _, ask = await desk()
    assert 413 == (await ask("POST", "tenants", {"id": "x", "display_name": "x" * 300_000}))[0]


async def test_the_state_of_limits(desk, store):
    """What is used of each limit, of the tenant and of each key."""
    running, ask = await desk()
    await ask("PATCH", "tenants/acme", {"limits": {"requests_per_minute": 10, "concurrent_requests": 3}})
    key = (await store.keys(ACME))[0]
    await ask("PATCH", f"keys/{key.id}", {"budgets": [{"period": "day", "unit": "tokens", "amount": 1000}]})
    await ask("GET", "tenants")
    await asyncio.sleep(0.6)
    used = (await running.chat())[1]["usage"]["total_tokens"]
    await asyncio.sleep(0.3)
    rows = {(row["owner"], row["limit"]): row for row in (await ask("GET", "tenants/acme/limits"))[1]["data"]}
    assert (10, 1, 9) == tuple(rows["tenant", "requests"][name] for name in ("allowed", "used", "remaining"))
    assert (3, 0, 3) == tuple(rows["tenant", "concurrent"][name] for name in ("allowed", "used", "remaining"))
    budget = rows["key", "budget_tokens"]
    assert (1000, used, "day", key.id) == (budget["allowed"], budget["used"], budget["period"], budget["key"])


async def test_prices(desk):
    """Set, shown and removed, in money for a million tokens; cached input is half price unless it's said."""
    _, ask = await desk()
    assert 200 == (await ask("PUT", "prices/tiny/chat", {"input": 0.5, "output": 1.5}))[0]
    row = {"object": "price", "model": "tiny/chat", "input": 0.5, "cached_input": 0.25, "output": 1.5}
    assert [row] == (await ask("GET", "prices"))[1]["data"]
    assert 200 == (await ask("DELETE", "prices/tiny/chat"))[0]
    assert 404 == (await ask("DELETE", "prices/tiny/chat"))[0]


async def test_share_groups(desk, share_store):
    """A group is made of tenants that there are; membership ends with the group or with the tenant."""
    _, ask = await desk()
    for tenant in ("one", "two"):
        await ask("POST", "tenants", {"id": tenant})
    assert 404 == (await ask("POST", "shares", {"name": "s", "tenants": ["one", "nobody"]}))[0]
    assert 201 == (await ask("POST", "shares", {"name": "s", "tenants": ["one", "two"]}))[0]
    assert 409 == (await ask("POST", "shares", {"name": "s", "tenants": ["one", "two"]}))[0]
    found = [await share_store.may_use(TenantId(tenant), "s") for tenant in ("one", "two", "acme")]
    assert [True, True, False] == found
    await ask("DELETE", "tenants/one")
    await ask("POST", "tenants", {"id": "one"})
    assert [False, True] == [await share_store.may_use(TenantId(tenant), "s") for tenant in ("one", "two")]
    assert ["two"] == (await ask("GET", "shares"))[1]["data"][0]["tenants"]
    assert 200 == (await ask("DELETE", "shares/s"))[0]
    assert not await share_store.may_use(TenantId("two"), "s")


async def test_everything_is_audited(desk, store):
    """Who did what to whom, in order; a refused change leaves no entry, and no secret is in any."""
    running, ask = await desk()
    admin = await store.create_key(ACME, "ops", "admin")
    await ask("POST", "tenants", {"id": "big"}, key=admin.secret)
    await ask("POST", "tenants", {"id": "big"})
    made = (await ask("POST", "tenants/big/keys", {}))[1]
    await ask("PATCH", "tenants/big", {"limits": {"samples": 2}, "weight": 2})
    await ask("PATCH", "tenants/big", {"weight": 2})
    await ask("PATCH", "tenants/big", {"status": "disabled"})
    rotated = (await ask("POST", f"keys/{made['id']}/rotate"))[1]
    await ask("DELETE", f"keys/{made['id']}")
    await ask("DELETE", "tenants/big")
    entries = (await ask("GET", "audit?tenant=big"))[1]["data"]
    assert [
        ("tenant.created", admin.record.id), ("key.created", "admin"), ("tenant.changed", "admin"), ("tenant.disabled", "admin"),
        ("key.created", "admin"), ("key.rotated", "admin"), ("key.revoked", "admin"), ("key.revoked", "admin"), ("tenant.deleted", "admin"),
    ] == [(entry["kind"], entry["actor"]) for entry in entries]  # fmt: skip
    assert "limits, weight" == entries[2]["detail"]
    assert sorted(entry["id"] for entry in entries) == [entry["id"] for entry in entries]
    everything = json.dumps((await ask("GET", "audit"))[1])
    for secret in (made["secret"], rotated["secret"], admin.secret, running.key):
        assert secret not in everything
    only = (await ask("GET", "audit?kind=key&limit=2"))[1]["data"]
    assert ["key.revoked", "key.revoked"] == [entry["kind"] for entry in only]


async def test_the_queue(desk, worker, kit):
    """Models with what waits and runs, tenants with what is open."""
    running, ask = await desk()
    await running.chat()
    answer = (await ask("GET", "queue"))[1]
    assert [(kit.model, 1)] == [(row["model"], row["workers"]) for row in answer["data"]]
    assert ["acme"] == [row["tenant"] for row in answer["tenants"]]


async def test_redis_away_is_a_503(desk, own_valkey, gateway, worker, kit):
    """No route hangs or crashes without Redis."""
    server = own_valkey()
    await worker(url=server.connection_url)
    running = await gateway(redis_url=server.connection_url)
    server.stop()
    for path in ("tenants", "keys", "prices", "usage", "audit", "queue", "tenants/acme/limits"):
        status, raw = await running.get(f"/admin/v1/{path}", Authorization=f"Bearer {kit.admin_key}")
        assert (503, "service_unavailable") == (status, kit.strict_json(raw)["error"]["code"]), path
