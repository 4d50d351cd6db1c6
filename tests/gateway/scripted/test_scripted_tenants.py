"""Tenants and keys seen from several gateways: who is let in, for how long, and what ends at once."""

import asyncio
import json
import time

import pytest

from protocol.codec import encode, pack
from protocol.ids import TenantId
from protocol.replies import Delta, Started

ACME = TenantId("acme")


async def _hold(one, job):
    await one.send(job, Started(one.worker_id), Delta(0, "x", (1,)))
    await asyncio.Event().wait()


async def _key(store):
    return (await store.keys(ACME))[0]


@pytest.fixture
def gateways(gateway):
    """Four gateways of one installation, one of which made the tenant and the key."""

    async def start():
        return [await gateway() for _ in range(4)]

    return start


@pytest.mark.parametrize("how", ["revoke", "disable", "delete", "expire"])
async def test_everywhere_within_a_second(gateways, worker, store, how):
    """A key that was in use on four gateways a moment ago is refused by all of them within a second of the change."""
    await worker(ttl_ms=30_000)
    four = await gateways()
    secret = four[0].key
    key = await store.find_key(secret)

    async def ask():
        headers = {"Authorization": f"Bearer {secret}"}
        return await asyncio.gather(*(one.get("/v1/models", **headers) for one in four))

    assert {200} == {status for status, _ in await ask()}
    changes = {
        "revoke": lambda: store.revoke_key(key.id),
        "disable": lambda: store.change_tenant(ACME, status="disabled"),
        "delete": lambda: store.delete_tenant(ACME),
        "expire": lambda: store.change_key(key.id, expires_ms=int(time.time() * 1000)),
    }
    await changes[how]()
    changed_s = time.monotonic()
    expected = 403 if how == "disable" else 401
    while {expected} != {status for status, _ in await ask()}:
        assert time.monotonic() - changed_s < 1.0
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["revoke", "disable", "delete"])
async def test_running_streams_end_at_once(gateways, worker, store, soon, how):
    """Streams and whole answers in the making, on every gateway; the workers are told, another tenant's goes on."""
    one = await worker(_hold, ttl_ms=30_000)
    four = await gateways()
    other = await four[0].client.post(
        four[0].url + "/v1/chat/completions",
        data=json.dumps({"model": one.model, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}),
        headers=await _other_headers(store),
    )
    secret = four[0].key
    for running in four:
        running.key = secret
    streams = [asyncio.create_task(running.stream()) for running in four]
    wholes = [asyncio.create_task(running.chat()) for running in four]
    await one.until(lambda: len(one.jobs) == 9)
    await soon(lambda: all(len(running.parts.reader.jobs()) >= 2 for running in four))
    key = await store.find_key(secret)
    if how == "revoke":
        await store.revoke_key(key.id)
    elif how == "disable":
        await store.change_tenant(ACME, status="disabled")
    else:
        await store.delete_tenant(ACME)
    changed_s = time.monotonic()
    raws = await asyncio.gather(*streams)
    statuses = await asyncio.gather(*wholes)
    assert time.monotonic() - changed_s < 1.0
    assert all(b'"access_revoked"' in raw and raw.endswith(b"data: [DONE]\n\n") for raw in raws)
    assert {(403, "access_revoked")} == {(status, body["error"]["code"]) for status, body, _ in statuses}
    await one.until(lambda: len(set(one.cancelled)) == 8)
    assert not other.content.at_eof()
    other.close()


async def _other_headers(store):
    await store.create_tenant(TenantId("other"), "Other")
    secret = (await store.create_key(TenantId("other"), "k")).secret
    return {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}


async def test_disabled_between_door_and_queue(gateway, worker, store, soon):
    """A tenant that's disabled while its request is being read gets nothing either."""
    one = await worker(_hold)
    running = await gateway()
    body = json.dumps({"model": one.model, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    reader, writer = await asyncio.open_connection(running.host, running.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:10])
    await soon(lambda: running.parts.num_answering == 1)
    await store.change_tenant(ACME, status="disabled")
    await asyncio.sleep(0.6)
    writer.write(body[10:])
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 403")
    writer.close()


async def test_an_enabled_tenant_is_back(gateway, worker, store, soon):
    """Disabling is no end."""
    await worker()
    running = await gateway()
    await store.change_tenant(ACME, status="disabled")

    async def answers(status):
        return (await running.chat())[0] == status

    await soon(lambda: answers(403))
    await store.change_tenant(ACME, status="active")
    assert await soon(lambda: answers(200)) < 1.0


async def test_rotation_overlaps(gateway, worker, store, soon):
    """Old and new key work until the overlap is over; then the old one is refused, and running answers of it were not cut."""
    one = await worker(_hold)
    running = await gateway()
    made = await store.rotate_key((await _key(store)).id, 1500)
    stream = asyncio.create_task(running.stream())
    await one.until(lambda: bool(one.jobs))
    for key in (running.key, made.secret):
        assert 200 == (await running.get("/v1/models", Authorization=f"Bearer {key}"))[0]

    async def is_over():
        return (await running.get("/v1/models", **running.headers()))[0] == 401

    await soon(is_over)
    assert 200 == (await running.get("/v1/models", Authorization=f"Bearer {made.secret}"))[0]
    await asyncio.sleep(0.5)
    assert not stream.done()
    stream.cancel()


async def test_scopes(gateway, worker, store, kit):
    """A key does what its scopes name and nothing else."""
    await worker()
    running = await gateway()
    body = {"model": kit.model, "messages": [{"role": "user", "content": "Hi"}]}
    expected = {"inference": (200, 200, 403), "usage": (403, 200, 403), "admin": (403, 403, 200)}
    for scope, wanted in expected.items():
        key = (await store.create_key(ACME, scope, scope)).secret
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        found = (
            (await running.post("/v1/chat/completions", body, headers=headers))[0],
            (await running.get("/v1/usage", **headers))[0],
            (await running.get("/admin/v1/tenants", **headers))[0],
        )
        assert wanted == found, scope


async def test_allowed_models(gateway, worker, store, soon):
    """A tenant sees and uses the models that it's allowed; another one looks as if it didn't exist."""
    await worker()
    await worker(model="big/model")
    running = await gateway()
    unknown = await running.post(
        "/v1/chat/completions", {"model": "big/nodel", "messages": [{"role": "user", "content": "Hi"}]}
    )
    await store.change_tenant(ACME, models=("tiny/chat",))

    async def listed():
        return [row["id"] for row in json.loads((await running.get("/v1/models", **running.headers()))[1])["data"]]

    async def is_narrow():
        return await listed() == ["tiny/chat"]

    await soon(is_narrow)
    assert 404 == (await running.get("/v1/models/big/model", **running.headers()))[0]
    refused = await running.post(
        "/v1/chat/completions", {"model": "big/model", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert (404, unknown[1]["error"]["message"].replace("big/nodel", "big/model")) == (
        refused[0],
        refused[1]["error"]["message"],
    )
    assert 200 == (await running.chat())[0]


async def test_last_used(gateway, worker, store, soon):
    """It is noted within seconds, in Redis' time."""
    await worker()
    running = await gateway()
    key = await _key(store)
    before_ms = int(time.time() * 1000)
    await running.chat()
    await running.parts.watch.write_uses()
    assert before_ms - 1000 <= (await store.last_used())[key.id] <= before_ms + 5000


async def test_a_key_written_into_redis_opens_nothing(gateway, worker, store, redis, keys):
    """Who can write to Redis can't make a key another tenant's, nor bring one from elsewhere, nor lift a limit."""
    await worker()
    running = await gateway("acme")
    victim = await gateway("victim")
    (digest, raw), *_ = [
        (digest, raw) for digest, raw in (await redis.hgetall(keys.api_keys)).items() if b"acme" in raw
    ]
    (theirs,) = [raw for raw in (await redis.hgetall(keys.api_keys)).values() if b"victim" in raw]
    forged = raw.replace(b"\xa4acme", b"\xa6victim")
    assert forged != raw
    unsigned = encode(await store.find_key(victim.key))
    for value in (forged, theirs, unsigned, pack([unsigned, b"\0" * 32]), b"", b"\xc1", raw + b"\0"):
        await redis.hset(keys.api_keys, digest, value)
        await redis.incr(keys.revision)
        await asyncio.sleep(0.6)
        assert 401 == (await running.get("/v1/models", **running.headers()))[0]
    await redis.hset(keys.api_keys, digest, raw)
    tenants = await redis.hgetall(keys.tenants)
    await redis.hset(keys.tenants, "acme", tenants[b"victim"])
    await redis.incr(keys.revision)
    await asyncio.sleep(0.6)
    assert 401 == (await running.get("/v1/models", **running.headers()))[0]
    assert 200 == (await victim.get("/v1/models", **victim.headers()))[0]


async def test_keys_of_a_deleted_tenant_are_not_those_of_the_next(gateway, worker, store):
    """A tenant is deleted and made again under the same id: old keys stay dead, old usage and limits are gone."""
    await worker()
    running = await gateway()
    await running.chat()
    await asyncio.sleep(0.2)
    await store.delete_tenant(ACME)
    await store.create_tenant(ACME, "Another")
    await asyncio.sleep(0.6)
    assert 401 == (await running.get("/v1/models", **running.headers()))[0]
    assert {0} == set((await store.usage(ACME)).values())


async def test_nothing_of_a_tenant_is_left(gateway, worker, store, redis, keys, soon):
    """Deleting a tenant, with a request of it running, removes all keys of its accounts, and nothing writes them again."""
    one = await worker(_hold)
    running = await gateway()
    stream = asyncio.create_task(running.stream())
    await one.until(lambda: bool(one.jobs))
    await store.delete_tenant(ACME)
    await stream
    await asyncio.sleep(2.5)  # a renewal has come and gone
    assert [keys.deleted(ACME)] == [name.decode() async for name in redis.scan_iter(keys.account(ACME, "*"))]
    assert 0 < await redis.ttl(keys.deleted(ACME)) <= 3600


async def test_a_request_let_in_before_the_deletion_is_not_admitted(gateway, worker, store, redis, keys, soon):
    """Its body comes after its tenant has gone: 401, and no account of the tenant appears again."""
    one = await worker()
    running = await gateway()
    body = json.dumps({"model": one.model, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    reader, writer = await asyncio.open_connection(running.host, running.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:10])
    await soon(lambda: running.parts.num_answering == 1)
    await store.delete_tenant(ACME)
    writer.write(body[10:])
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 401")
    writer.close()
    assert [keys.deleted(ACME)] == [name.decode() async for name in redis.scan_iter(keys.account(ACME, "*"))]
