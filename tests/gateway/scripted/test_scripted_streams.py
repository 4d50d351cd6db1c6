"""Answers as streams: their exact bytes, what the real `openai` client makes of them, and failures before and after the first byte."""

import asyncio
import json

import openai
import pytest

from protocol.replies import LAST_SEQUENCE, Delta, Done, Failed, Started


def _scrubbed(raw, head):
    """The stream with what differs each time put to a fixed value."""
    text = raw.decode()
    for name in ("id", "created", "system_fingerprint"):
        text = text.replace(f'"{name}":{json.dumps(head[name])}', f'"{name}":0')
    return text.encode()


async def test_chat_stream_bytes(gateway, worker, kit):
    """A chat stream is, byte for byte: role chunk, content chunks, finish chunk, usage chunk, [DONE].

    Tokens that come at once, as they may, are one chunk.
    """
    await worker()
    running = await gateway()
    raw = await running.stream(stream_options={"include_usage": True})
    head = '{"id":0,"created":0,"model":"tiny/chat","system_fingerprint":0,"object":"chat.completion.chunk","choices":'
    prompt_tokens = len("<user\nHi>\n<assistant\n")

    def chunk(delta, finish="null"):
        return f'data: {head}[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]}}\n\n'

    expected = (
        chunk('{"role":"assistant","content":""}') + chunk('{"content":"Hel"}') + chunk('{"content":"lo"}')
        + chunk("{}", '"stop"')
        + f'data: {head}[],"usage":{{"prompt_tokens":{prompt_tokens},"completion_tokens":2,'
        f'"total_tokens":{prompt_tokens + 2},"prompt_tokens_details":{{"cached_tokens":0}}}}}}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip
    at_once = expected.replace(chunk('{"content":"Hel"}') + chunk('{"content":"lo"}'), chunk('{"content":"Hello"}'))
    assert _scrubbed(raw, kit.events(raw)[0]).decode() in {expected, at_once}


async def test_stream_headers(gateway, worker):
    """A stream is never cached or buffered, is labelled as events, and names the request."""
    await worker()
    running = await gateway()
    body = {"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with running.client.post(
        running.url + "/v1/chat/completions", json=body, headers=running.headers(**{"X-Request-Id": "mine-1"})
    ) as response:
        assert "text/event-stream; charset=utf-8" == response.headers["Content-Type"]
        assert "no-cache" == response.headers["Cache-Control"]
        assert "no" == response.headers["X-Accel-Buffering"]
        assert "mine-1" == response.headers["x-request-id"]


async def test_head_is_constant(gateway, worker, kit):
    """id, created, model and fingerprint are the same in every chunk, and no usage is sent unasked."""
    await worker()
    raw = await (await gateway()).stream()
    chunks = kit.events(raw)[:-1]
    assert 1 == len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks})
    assert not any("usage" in chunk for chunk in chunks)


async def test_openai_client(gateway, worker):
    """The real client reads a whole answer, and the same text from a stream."""
    await worker()
    running = await gateway()
    messages = [{"role": "user", "content": "Hi"}]
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key=running.key, max_retries=0) as client:
        whole = await client.chat.completions.create(model="tiny/chat", messages=messages)
        assert "Hello" == whole.choices[0].message.content
        assert 2 == whole.usage.completion_tokens
        texts = []
        async for chunk in await client.chat.completions.create(model="tiny/chat", messages=messages, stream=True):
            texts += [choice.delta.content or "" for choice in chunk.choices]
        assert "Hello" == "".join(texts)
        text = await client.completions.create(model="tiny/chat", prompt="Hi")
        assert "Hello" == text.choices[0].text
        assert ["tiny/chat"] == [model.id async for model in client.models.list()]


async def test_openai_client_errors(gateway, worker):
    """The real client raises its own classes, with code and param."""
    await worker()
    running = await gateway()
    messages = [{"role": "user", "content": "Hi"}]
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key=running.key, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nobody", messages=messages)
        assert "model_not_found" == caught.value.code
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny/chat", messages=messages, temperature=3)
        assert "temperature" == refused.value.param
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="sk-wrong-key", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_several_samples(gateway, worker, kit, path):
    """n samples: each index has its own chunks and one finish, and usage is their sum."""
    await worker()
    raw = await (await gateway()).stream(path, n=3, stream_options={"include_usage": True})
    *chunks, last, done = kit.events(raw)
    finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert ([0, 1, 2], 6, "[DONE]") == (sorted(finished), last["usage"]["completion_tokens"], done)
    assert [] == last["choices"]


async def test_failure_before_the_first_byte(gateway, worker):
    """A job that fails before any token is a real error status, streamed or not."""

    async def fail(one, job):
        await one.send(job, Started(one.worker_id), Failed("kv_integrity_error", "the cache failed a check"))

    await worker(fail)
    running = await gateway()
    for stream in (False, True):
        status, body, _ = await running.chat(stream=stream)
        assert (500, "kv_integrity_error", "server_error") == (status, body["error"]["code"], body["error"]["type"])


async def test_failure_after_the_first_byte(gateway, worker, kit):
    """After the first byte a failure is one error event, then [DONE], then a clean end, over one status line."""

    async def fail(one, job):
        await one.send(job, Started(one.worker_id), Delta(0, "Hel", (1,)))
        await one.send(job, Failed("internal_error", "the worker had an error"))

    await worker(fail)
    running = await gateway()
    body = json.dumps({"model": kit.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection(running.host, running.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.key}\r\nConnection: close\r\n"
    )
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    raw = await reader.read()
    writer.close()
    assert 1 == raw.count(b"HTTP/1.1 ")
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    error = [e for e in kit.events(raw) if "error" in e]
    assert [
        {"message": "the worker had an error", "type": "server_error", "param": None, "code": "internal_error"}
    ] == [e["error"] for e in error]


async def test_duplicates_are_dropped_and_stale_attempts_refused(gateway, worker, kit):
    """A reply that comes twice is shown once; another attempt's reply never."""

    async def stutter(one, job):
        await one.send(job, Started(one.worker_id))
        await one.send(job, Delta(0, "a", (1,)))
        await one.send(job, Delta(0, "a", (1,)), sequence=1)
        await one.send(job, Delta(0, "STALE", (1,)), attempt=7, sequence=2)
        await one.send(job, Delta(0, "b", (2,), finish_reason="stop"), Done(3, 0, 2))

    await worker(stutter)
    status, body, _ = await (await gateway()).chat()
    assert (200, "ab") == (status, body["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "replies",
    [[Started("w"), None, Delta(0, "a", (1,))], [Delta(0, "a", (1,))], [Started("w"), Started("w")]],
    ids=["gap", "no start", "two starts"],
)
async def test_a_gap_or_a_wrong_order_is_an_error(gateway, worker, replies):
    """What is missing or out of order ends the request: no text is made up."""

    async def broken(one, job):
        for number, reply in enumerate(replies):
            if reply is not None:
                await one.send(job, reply, sequence=number)

    await worker(broken)
    status, body, _ = await (await gateway()).chat()
    assert (500, "internal_error") == (status, body["error"]["code"])


async def test_last_word_for_a_dead_worker(gateway, worker):
    """Who ends a request on behalf of a dead worker needs no sequence number."""

    async def reaped(one, job):
        await one.send(job, Started(one.worker_id))
        await one.send(job, Failed("worker_lost", "the worker was lost"), sequence=LAST_SEQUENCE)

    await worker(reaped)
    status, body, _ = await (await gateway()).chat()
    assert (503, "worker_lost") == (status, body["error"]["code"])


async def test_keep_alive_comment(gateway, worker):
    """A silent stream gets the comment ': ping' with exactly one newline."""

    async def slow(one, job):
        await one.send(job, Started(one.worker_id))
        await asyncio.sleep(0.35)
        await one.send(job, Delta(0, "x", (1,), finish_reason="length"), Done(1, 0, 1))

    await worker(slow)
    raw = await (await gateway(keep_alive_s=0.15)).stream()
    assert b": ping\n: ping\ndata: " in raw
    assert b"id: " not in raw
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_text_is_not_escaped_or_split(gateway, worker, kit):
    """Any Unicode passes unchanged, every line is UTF-8 of its own."""
    text = ["\U0001fae0", "\u2028\x00\r\n", "नि", "</data>\n\ndata: {}"]

    async def speak(one, job):
        await one.answer(job, text)

    await worker(speak)
    raw = await (await gateway()).stream()
    chunks = [e for e in kit.events(raw) if e != "[DONE]"]
    assert "".join(text) == "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


async def test_every_fast_answer_is_complete(gateway, worker):
    """400 one-token answers, 50 at a time, with the reader held up: none loses its beginning or its end."""
    await worker()
    running = await gateway(intake_processes=2)
    reader, read = running.parts.reader, running.parts.reader._read

    async def late(stream):
        await asyncio.sleep(0.05)
        await read(stream)

    reader._read = late
    gate = asyncio.Semaphore(50)

    async def one():
        async with gate:
            return await running.chat(max_tokens=1)

    answers = await asyncio.gather(*(one() for _ in range(400)))
    assert {(200, "Hello")} == {(status, body["choices"][0]["message"]["content"]) for status, body, _ in answers}


@pytest.mark.parametrize("outcome", ["done", "failed"])
async def test_an_answer_before_its_submission_returns(gateway, worker, kit, outcome):
    """An answer, or a failure, that is complete before the gateway hears that the job was queued is neither lost nor cut."""

    async def at_once(one, job):
        last = Done(1, 0, 1) if outcome == "done" else Failed("internal_error", "broke")
        await one.send(job, Started(one.worker_id), Delta(0, "Hello", (1,), finish_reason="stop"), last)

    await worker(at_once)
    running = await gateway()
    submitter = running.parts.generations._submitter
    send = submitter._send

    async def slow(*arguments, **options):
        result = await send(*arguments, **options)
        await asyncio.sleep(0.2)
        return result

    submitter._send = slow
    status, body, _ = await running.chat()
    raw = (await running.stream()).decode()
    if outcome == "done":
        assert (200, "Hello") == (status, body["choices"][0]["message"]["content"])
        assert '"content":"Hello"' in raw
        assert '"finish_reason":"stop"' in raw
    else:
        assert (500, "internal_error") == (status, body["error"]["code"])
        assert 1 == raw.count('"error"')


async def test_a_slowly_read_stream_keeps_its_tail(gateway, worker, kit):
    """What arrives while a write waits for the client is sent too: the end of a stream is never lost."""
    texts = ["x" * 100_000] * 100 + ["the end"]

    async def much(one, job):
        await one.answer(job, texts, pause_s=0.001)

    one = await worker(much)
    running = await gateway()
    body = {"model": kit.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with running.client.post(
        running.url + "/v1/chat/completions", json=body, headers=running.headers()
    ) as response:
        first = await response.content.readany()
        await one.until(lambda: bool(one.jobs))
        await asyncio.sleep(1.0)  # all has been published, most of it waits in the gateway
        raw = first + await response.read()
    chunks = [event["choices"][0] for event in kit.events(raw)[:-1]]
    assert "".join(texts) == "".join(choice["delta"].get("content", "") for choice in chunks)
    assert "stop" == chunks[-1]["finish_reason"]
