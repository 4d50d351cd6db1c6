"""Bodies and routes at the edge of HTTP: size, time, type, big prompts; and errors of one shape on every path."""

import asyncio
import json
import time

import pytest

LIMIT = 64 * 1024


async def _raw(running, request, timeout_s=10.0):
    """A raw exchange; returns the status and the error object."""
    reader, writer = await asyncio.open_connection(running.host, running.port)
    writer.write(request)
    async with asyncio.timeout(timeout_s):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), json.loads(body)["error"]


def _head(running, *lines):
    fixed = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {running.key}"]
    return "\r\n".join([*fixed, *(lines or ["Content-Type: application/json"]), "", ""]).encode()


async def test_size_limit(gateway, worker, kit):
    """A body of exactly the limit is read; one byte more is a 413, chunked or not, and before all of it has been sent."""
    await worker()
    running = await gateway(max_body_bytes=LIMIT)
    body = json.dumps({"model": kit.model, "messages": [{"role": "user", "content": "x"}], "user": ""}).encode()
    body = body.replace(b'"user": ""', b'"user": "' + b"x" * (LIMIT - len(body)) + b'"')
    assert (LIMIT, 200) == (len(body), (await running.post("/v1/chat/completions", body))[0])
    status, answer, _ = await running.post("/v1/chat/completions", body + b" ")
    assert (413, "request_too_large") == (status, answer["error"]["code"])
    declared = _head(running, "Content-Type: application/json", "Content-Length: 99999999")
    assert (413, "request_too_large") == ((result := await _raw(running, declared + b"{"))[0], result[1]["code"])
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    chunked = _head(running, "Content-Type: application/json", "Transfer-Encoding: chunked")
    assert 413 == (await _raw(running, chunked + chunk + chunk))[0]


async def test_slow_body(gateway, worker):
    """A body that does not arrive in time is a 408, and other requests are served meanwhile."""
    await worker()
    running = await gateway(body_timeout_s=0.3)
    slow = [
        asyncio.create_task(
            _raw(running, _head(running, "Content-Type: application/json", "Content-Length: 100") + b"{")
        )
        for _ in range(50)
    ]
    assert 200 == (await running.chat())[0]
    assert {(408, "request_timeout")} == {(status, error["code"]) for status, error in await asyncio.gather(*slow)}


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Type: text/plain", 415), ("Content-Type: multipart/form-data; boundary=x", 415),
        ("Content-Type: application/json\r\nContent-Encoding: gzip", 415), ("Content-Type: application/json", 400),
    ],
)  # fmt: skip
async def test_types(gateway, worker, header, status):
    """A body must be uncompressed JSON; an empty one is a 400."""
    await worker()
    running = await gateway()
    assert status == (await _raw(running, _head(running, header, "Content-Length: 0")))[0]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405), ("PUT", "/metrics", 405),
        ("GET", "/v1/nothing", 404), ("POST", "/", 404), ("GET", "/v1/embeddings", 404), ("GET", "/%00", 404),
        ("GET", "/v1/models/no/such/model", 404), ("GET", "/../../etc/passwd", 404),
    ],
)  # fmt: skip
async def test_routes_that_are_none(gateway, worker, kit, method, path, status):
    """Every path and method answers in the OpenAI error shape."""
    await worker()
    running = await gateway()
    async with running.client.request(method, running.url + path, headers=running.headers()) as response:
        error = kit.strict_json(await response.read())["error"]
    assert (status, {"message", "type", "param", "code"}) == (response.status, set(error))


async def test_models(gateway, worker, kit):
    """Models are listed while a worker serves them; an id may hold slashes, encoded or not."""
    await worker()
    running = await gateway()
    listed = kit.strict_json((await running.get("/v1/models", **running.headers()))[1])
    assert ("list", ["tiny/chat"], ["model"]) == (
        listed["object"], [m["id"] for m in listed["data"]], [m["object"] for m in listed["data"]]
    )  # fmt: skip
    for name in ("tiny/chat", "tiny%2Fchat"):
        status, raw = await running.get(f"/v1/models/{name}", **running.headers())
        assert (200, 1_700_000_000) == (status, kit.strict_json(raw)["created"])


async def test_a_model_whose_card_is_unreadable_harms_no_other(gateway, worker, keys, redis):
    """A worker of another version, whose card or status means nothing here, leaves other models as they are."""
    await worker()
    strange = await worker(model="tiny/strange")
    running = await gateway()
    async for key in redis.scan_iter(f"{keys.prefix}:{{tiny/strange}}:card:*"):
        await redis.set(key, b"\x93\x01\x02\x03", keepttl=True)
    assert strange.jobs == []
    assert 200 == (await running.chat())[0]
    assert 200 == (await running.get("/v1/models", **running.headers()))[0]


async def test_big_bodies_do_not_stop_the_rest(gateway, worker, kit):
    """A prompt of 1.5 MB passes; bodies of many megabytes, valid or not, hold up neither health nor a running stream."""

    async def tick(one, job):
        await one.answer(job, ["x"] * 60 if len(job.prompt_token_ids) < 1000 else ["big"], pause_s=0.05)

    await worker(tick, max_request_tokens=2_000_000)
    running = await gateway(max_body_bytes=16 * 1024 * 1024, intake_processes=2)
    gaps_s, is_over = [], False

    async def watch():
        while not is_over:
            started_s = time.monotonic()
            await running.get("/health/live")
            gaps_s.append(time.monotonic() - started_s)
            await asyncio.sleep(0.02)

    stream = asyncio.create_task(running.stream())
    await running.chat("warm")
    watching = asyncio.create_task(watch())
    status, body, _ = await running.chat("word " * 300_000)
    assert (200, "big") == (status, body["choices"][0]["message"]["content"])
    junk = b"[" + b"1," * 5_000_000 + b"1]"
    assert 400 == (await running.post("/v1/chat/completions", junk))[0]
    is_over = True
    await watching
    assert kit.events(await stream)[-1] == "[DONE]"
    assert max(gaps_s) < 0.25
