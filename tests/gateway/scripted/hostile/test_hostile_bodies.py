"""Bodies that are no JSON, too much of it, or not all there."""

import gzip
import json
import zlib

ROUTE = "/v1/chat/completions"
LIMIT = 16 * 1024 * 1024
BAD = (400, None, None)
TOO_LARGE = (413, "request_too_large", None)
NO_TYPE = (415, "unsupported_media_type", None)


def _chat(**fields) -> bytes:
    return json.dumps({"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()


def _with(text: str) -> bytes:
    """A good body and one more piece of raw JSON at its end."""
    return _chat()[:-1] + b", " + text.encode() + b"}"


def _message(text: str) -> bytes:
    return b'{"model": "tiny/chat", "messages": [' + text.encode() + b"]}"


NO_JSON = [
    ("empty", BAD, b""), ("spaces", BAD, b" \n\t "), ("NULs", BAD, bytes(100)), ("brace", BAD, b"{"), ("open string", BAD, b'{"model": "tiny'),
    ("half of it", BAD, _chat()[:40]), ("all but the last byte", BAD, _chat()[:-1]), ("a byte more", BAD, _chat() + b"}"),
    ("two bodies", BAD, _chat() * 2), ("JSON lines", BAD, _chat() + b"\n" + _chat()), ("array", BAD, b"[" + _chat() + b"]"),
    ("null", BAD, b"null"), ("true", BAD, b"true"), ("number", BAD, b"5"), ("string", BAD, b'"{}"'), ("NaN", BAD, b"NaN"),
    ("single quotes", BAD, b"{'model': 'tiny/chat'}"), ("trailing comma", BAD, _chat()[:-1] + b",}"), ("comment", BAD, b"/* */" + _chat()),
    ("unquoted name", BAD, b'{model: "tiny/chat"}'), ("form", BAD, b"model=tiny%2Fchat&prompt=x"), ("XML", BAD, b"<?xml version='1.0'?><a/>"),
    ("entity bomb", BAD, b'<!DOCTYPE a [<!ENTITY b "bbb">]><a>&b;</a>'), ("msgpack", BAD, b"\x82\xa5model\xa9tiny/chat"), ("pickle", BAD, b"\x80\x04\x95\x10"),
    ("bare control byte", BAD, b'{"model": "tiny\x01chat"}'), ("bare newline in a string", BAD, b'{"model": "tiny\nchat"}'),
    ("bad escape", BAD, b'{"model": "\\x41"}'), ("short escape", BAD, b'{"model": "\\u12"}'), ("leading zero", BAD, _with('"n": 01')),
    ("plus sign", BAD, _with('"n": +1')), ("hexadecimal", BAD, _with('"n": 0x1')), ("lone minus", BAD, _with('"n": -')), ("missing colon", BAD, b'{"model" "x"}'),
]  # fmt: skip

TEXTS = [
    ("invalid UTF-8", BAD, b'{"model": "\xff"}'), ("cut UTF-8", BAD, b'{"model": "\xe2\x82"}'), ("overlong UTF-8", BAD, b'{"model": "\xc0\xaf"}'),
    ("surrogates in UTF-8", BAD, b'{"model": "\xed\xa0\x80"}'), ("beyond Unicode", BAD, b'{"model": "\xf7\xbf\xbf\xbf"}'), ("Latin-1", BAD, '{"a": "é"}'.encode("latin-1")),
    ("byte order mark", BAD, b"\xef\xbb\xbf" + _chat()), ("UTF-16", BAD, _chat().decode().encode("utf-16")), ("UTF-16 without a mark", BAD, _chat().decode().encode("utf-16-le")),
    ("UTF-32", BAD, _chat().decode().encode("utf-32")), ("gzip without saying so", BAD, gzip.compress(_chat())), ("zlib without saying so", BAD, zlib.compress(_chat())),
    *((f"lone surrogate in {name}", (400, None, name), _with(f'"{name}": "\\ud800"')) for name in ("stop", "cache_salt")),
    ("lone surrogate in model", (400, None, "model"), b'{"model": "\\ud800"}'),
    ("lone surrogate in content", (400, None, "messages[0].content"), _message('{"role": "user", "content": "a\\udfffb"}')),
    ("swapped surrogates", (400, None, "messages[0].content"), _message('{"role": "user", "content": "\\ude00\\ud83d"}')),
    ("lone surrogate in a part", (400, None, "messages[0].content[0].text"), _message('{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}')),
    ("lone surrogate in a name", (400, None, "messages[0].name"), _message('{"role": "user", "content": "x", "name": "\\ud800"}')),
    ("lone surrogate in a role", (400, None, "messages[0].role"), _message('{"role": "\\ud800", "content": "x"}')),
    ("lone surrogate in the second message", (400, None, "messages[1].content"),
     _message('{"role": "user", "content": "x"}, {"role": "user", "content": "\\udc00"}')),
    ("model twice", (400, None, "model"), b'{"model": "tiny/chat", "model": "tiny/chat"}'),
    ("messages twice", (400, None, "messages"), _with('"messages": []')), ("unknown field twice", (400, None, "x"), _with('"x": 1, "x": 1')),
    ("role twice", (400, None, "role"), _message('{"role": "user", "role": "system", "content": "x"}')),
    ("escaped twin", (400, None, "n"), _with('"n": 1, "\\u006e": 2')), ("twins inside what is ignored", (400, None, "b"), _with('"metadata": {"a": [{"b": 1, "b": 2}]}')),
    ("huge name twice", (400, None, "k" * 64), _with(f'"{"k" * 5000}": 1, "{"k" * 5000}": 2')),
]  # fmt: skip

SIZES = [
    ("deep arrays", BAD, b"[" * 100_000), ("deep objects", BAD, b'{"a":' * 50_000), ("deep and closed", BAD, b"[" * 50_000 + b"]" * 50_000),
    ("deep in a field", BAD, _with('"stop": ' + "[" * 50_000 + "]" * 50_000)), ("deep in what is ignored", BAD, _with('"metadata": ' + "[" * 50_000 + "]" * 50_000)),
    ("deep messages", BAD, b'{"messages":[' * 50_000), ("long number", BAD, _with('"n": ' + "9" * 5000)), ("long number ignored", BAD, _with('"x": ' + "9" * 5000)),
    ("long fraction", (400, None, "temperature"), _with('"temperature": 9.' + "9" * 100_000)), ("long exponent", (400, None, "temperature"), _with('"temperature": 1e' + "9" * 4000)),
    ("big spaces", BAD, b" " * LIMIT), ("big array", BAD, b"[" + b"1," * 4_000_000 + b"1]"), ("big array of arrays", BAD, b"[" + b"[]," * 2_000_000 + b"[]]"),
    ("many fields", (400, None, "model"), ("{" + ",".join(f'"f{i}":{i}' for i in range(200_000)) + "}").encode()),
    ("big ignored field", (400, None, "model"), b'{"x": "' + b"x" * 10_000_000 + b'"}'), ("big model", (400, None, "model"), b'{"model": "' + b"x" * 10_000_000 + b'"}'),
    ("big content", (400, "context_length_exceeded", "messages"), _chat(messages=[{"role": "user", "content": "word " * 300_000}])),
    ("many messages", (400, None, "messages"), _chat(messages=[{"role": "user", "content": "x"}] * 100_000)),
    ("many parts", (400, "context_length_exceeded", "messages"), _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}])),
    ("many stops", (400, None, "stop"), _chat(stop=["x"] * 100_000)), ("a long stop", (400, None, "stop"), _chat(stop="x" * 1_000_000)),
    ("many stop ids", (400, None, "stop_token_ids"), _chat(stop_token_ids=[1] * 100_000)),
    ("many biases", (400, None, "logit_bias"), _chat(logit_bias={str(i): 1 for i in range(100_000)})),
    ("a byte over the limit", TOO_LARGE, b" " * (LIMIT + 1)), ("twice the limit", TOO_LARGE, b" " * (2 * LIMIT)),
]  # fmt: skip

BOMB = gzip.compress(bytes(200_000_000), 9)


async def _wrong_rows(front, rows) -> list:
    wrong = []
    for name, expected, body in rows:
        answer = await front.send(front.request(body), timeout_s=60)
        error = answer.error or {}
        seen = (answer.status, error.get("code"), error.get("param"))
        if seen != expected or not error:
            wrong.append((name, seen, answer.body[:200]))
    return wrong


async def test_no_json(front, unharmed):
    """What isn't a JSON object is a 400."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, NO_JSON)


async def test_texts(front, unharmed):
    """Text that isn't Unicode, and objects that say a thing twice, are a 400 that names the place."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, TEXTS)


async def test_sizes(front, unharmed):
    """Deep, long and big bodies are a 400 or 413, and the memory that they took is given back."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, SIZES)


async def test_bombs_are_not_unpacked(front, unharmed):
    """A compressed body is refused by its header, with or without a length; the rest of it is dropped as it is."""
    running = await front()
    async with unharmed(running):
        for coding in ("gzip", "deflate"):
            line = f"Content-Encoding: {coding}"
            for raw in (
                running.request(BOMB, line),
                running.head("Content-Type: application/json", line, "Transfer-Encoding: chunked")
                + b"%x\r\n" % len(BOMB)
                + BOMB
                + b"\r\n0\r\n\r\n",
            ):
                answer = await running.send(raw)
                assert (415, "unsupported_media_type") == (answer.status, answer.error["code"])


async def test_chunks_over_the_limit(front, unharmed):
    """Chunks are counted as they come, big or tiny."""
    running = await front("--max-body-bytes", "65536")
    head = running.head("Content-Type: application/json", "Transfer-Encoding: chunked")
    big = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    async with unharmed(running):
        for chunk, count in ((big, 4), (b"1\r\nx\r\n", 70_000)):
            answer = await running.send(head, *([chunk * 100] * (count // 100) or [chunk] * count))
            assert (413, "request_too_large") == (answer.status, answer.error["code"])


async def test_bodies_that_end_too_soon(front, unharmed):
    """A client that stops in the middle of its body has gone, or hears a 400; never a 500."""
    running = await front()
    body = _chat()
    async with unharmed(running):
        for size in (0, 1, 10, len(body) - 1):
            for head in (
                running.head("Content-Type: application/json", f"Content-Length: {len(body)}"),
                running.head("Content-Type: application/json", "Transfer-Encoding: chunked") + b"%x\r\n" % len(body),
            ):
                assert (await running.send(head + body[:size], ends=True)).status in (0, 400)


async def test_a_key_is_checked_before_the_body_is_asked_for(front, unharmed):
    """With `Expect: 100-continue` a bad key is refused without a 100, a good one gets it and then the answer."""
    running = await front()
    body = _chat()
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue")
    async with unharmed(running):
        refused = await running.everything(running.head(*lines).replace(running.key.encode(), b"unknown-key"))
        assert refused.startswith(b"HTTP/1.1 401")
        served = await running.everything(running.head(*lines) + body)
        assert served.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


async def test_many_large_bodies_at_once(front, unharmed):
    """Bodies beyond the memory for them are refused with a time to wait; a tenant that sends them leaves room for the others."""
    running = await front("--max-body-bytes", "1000000", "--max-buffered-bytes", "4000000", "--body-timeout", "2")
    head = running.head("Content-Type: application/json", "Content-Length: 900000")
    async with unharmed(running):
        import asyncio

        answers = await asyncio.gather(*(running.send(head + b" " * 800_000) for _ in range(20)))
        assert {408, 429} == {answer.status for answer in answers}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status == 429)
        assert [] == [answer for answer in answers if not answer.error]
