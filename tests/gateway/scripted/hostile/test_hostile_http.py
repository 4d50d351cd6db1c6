"""What isn't HTTP, or is HTTP that two servers could read in two ways: request lines, headers and framing, byte for byte."""

import json
import time

from redis.asyncio import Redis

from protocol.ids import ModelName, TenantId
from protocol.key_space import KeySpace
from protocol.usage import UsageRow

BODY = json.dumps({"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}]}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1"
HOST = b"Host: x"
AUTH = b"Authorization: Bearer {key}"
JSON = b"Content-Type: application/json"
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
GOOD = (HOST, AUTH, JSON, LENGTH)

MALFORMED = (400, "malformed_request", None)
TOO_LARGE = (431, "headers_too_large", None)
NO_KEY = (401, "invalid_api_key", None)
NO_ROUTE = (404, "not_found", None)
NO_TYPE = (415, "unsupported_media_type", None)
SESSION = (400, None, "x-session-affinity")
SERVED = (200, None, None)


def _get(target: bytes, *lines: bytes) -> bytes:
    return _raw(b"GET " + target + b" HTTP/1.1", HOST, AUTH, *lines)


def _raw(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([*lines, b"", b""]) + body


def _post(*lines: bytes, body: bytes = BODY) -> bytes:
    return _raw(POST, *lines, body=body)


REQUEST_LINES = [
    ("TLS hello", MALFORMED, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
    ("SSH", MALFORMED, b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
    ("Redis inline", MALFORMED, b"PING\r\n\r\n"),
    ("Redis array", MALFORMED, b"*1\r\n$4\r\nPING\r\n\r\n"),
    ("SMTP", MALFORMED, b"EHLO x\r\n\r\n"),
    ("HTTP/2 preface", MALFORMED, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("SOCKS", MALFORMED, b"\x05\x01\x00\r\n\r\n"),
    ("zeros", MALFORMED, bytes(64) + b"\r\n\r\n"),
    ("random bytes", MALFORMED, bytes(range(128, 256)) + b"\r\n\r\n"),
    ("method alone", MALFORMED, b"GET\r\n\r\n"),
    ("no target", MALFORMED, b"GET HTTP/1.1\r\n\r\n"),
    ("unknown version", MALFORMED, _raw(b"GET / HTTP/9.9", HOST)),
    ("HTTP/2.0", MALFORMED, _raw(b"GET / HTTP/2.0", HOST)),
    ("no version number", MALFORMED, _raw(b"GET / HTTP/", HOST)),
    ("other protocol", MALFORMED, _raw(b"GET / ICY/1.1", HOST)),
    ("lower-case method", MALFORMED, _raw(b"get /v1/models HTTP/1.1", HOST)),
    ("unknown method", MALFORMED, _raw(b"FOO /v1/models HTTP/1.1", HOST)),
    ("method with a NUL", MALFORMED, _raw(b"GE\x00T / HTTP/1.1", HOST)),
    ("huge method", MALFORMED, _raw(b"A" * 9000 + b" / HTTP/1.1", HOST)),
    ("tabs for spaces", MALFORMED, _raw(b"GET\t/v1/models\tHTTP/1.1", HOST)),
    ("leading space", MALFORMED, _raw(b" GET /v1/models HTTP/1.1", HOST)),
    ("word after the version", MALFORMED, _raw(b"GET /v1/models HTTP/1.1 x", HOST)),
    ("huge target", TOO_LARGE, _get(b"/" + b"x" * 9000)),
    ("huge query", TOO_LARGE, _get(b"/v1/models?" + b"x" * 9000)),
    ("target in UTF-8", MALFORMED, _get("/v1/modéls".encode())),
    ("target in Latin-1", MALFORMED, _get(b"/v1/mod\xe9ls")),
    ("target with a NUL", MALFORMED, _get(b"/v1/\x00models")),
    ("query in Latin-1", MALFORMED, _get(b"/v1/models?\xff")),
    ("backslashes", MALFORMED, _get(b"\\v1\\models")),
    ("relative target", MALFORMED, _get(b"v1/models")),
    ("bad IPv6 target", MALFORMED, _get(b"http://[::1/v1/models")),
    ("bad port in the target", MALFORMED, _get(b"http://a:99999999/v1/models")),
    ("broken escape", NO_ROUTE, _get(b"/%zz")),
    ("escaped NUL", NO_ROUTE, _get(b"/%00")),
    ("escaped slash dots", NO_ROUTE, _get(b"/..%2f..%2fetc/passwd")),
    ("dots", NO_ROUTE, _get(b"/../../etc/passwd")),
    ("double slash", NO_ROUTE, _get(b"//v1/models")),
    ("model in broken UTF-8", (404, "model_not_found", "model"), _get(b"/v1/models/%ff%fe")),
    ("model with CR LF", NO_ROUTE, _get(b"/v1/models/x%0d%0aX-Evil:%201")),
    ("model with a NUL", (404, "model_not_found", "model"), _get(b"/v1/models/%00")),
    ("huge model", (404, "model_not_found", "model"), _get(b"/v1/models/" + b"m" * 5000)),
    ("CONNECT", NO_ROUTE, _raw(b"CONNECT evil:443 HTTP/1.1", HOST)),
    ("OPTIONS *", NO_ROUTE, _raw(b"OPTIONS * HTTP/1.1", HOST)),
    ("TRACE", (405, "method_not_allowed", None), _raw(b"TRACE /v1/models HTTP/1.1", HOST)),
    ("DELETE", (405, "method_not_allowed", None), _raw(b"DELETE /v1/chat/completions HTTP/1.1", HOST)),
    ("PATCH", (405, "method_not_allowed", None), _raw(b"PATCH /metrics HTTP/1.1", HOST)),
    ("HTTP/0.9", MALFORMED, b"GET /\r\n\r\n"),
]

HEADERS = [
    ("no Host", MALFORMED, _post(AUTH, JSON, LENGTH)),
    ("two Hosts", MALFORMED, _post(HOST, b"Host: y", AUTH, JSON, LENGTH)),
    ("space in a name", MALFORMED, _post(*GOOD, b"X Y: 1")),
    ("space before the colon", MALFORMED, _post(*GOOD, b"X-Y : 1")),
    ("empty name", MALFORMED, _post(*GOOD, b": 1")),
    ("no colon", MALFORMED, _post(*GOOD, b"abc")),
    ("folded line", MALFORMED, _post(HOST, JSON, LENGTH, b"X: 1", b" 2", AUTH)),
    ("folded first line", MALFORMED, _post(b" X: 1", *GOOD)),
    ("NUL in a value", MALFORMED, _post(*GOOD, b"X: a\x00b")),
    ("control byte in a value", MALFORMED, _post(*GOOD, b"X: a\x01b")),
    ("bare LF", MALFORMED, _post(*GOOD, b"X: a\nY: b")),
    ("bare CR", MALFORMED, _post(*GOOD, b"X: a\rY: b")),
    ("CR CR LF", MALFORMED, _post(*GOOD, b"X: a\r")),
    ("LF for every line end", MALFORMED, _post(*GOOD).replace(b"\r\n", b"\n")),
    ("name in Latin-1", MALFORMED, _post(*GOOD, b"X\xe9: 1")),
    ("name with brackets", MALFORMED, _post(*GOOD, b"X(y): 1")),
    ("name with a quote", MALFORMED, _post(*GOOD, b'X"y: 1')),
    ("huge value", TOO_LARGE, _post(*GOOD, b"X: " + b"a" * 9000)),
    ("huge name", TOO_LARGE, _post(*GOOD, b"X" * 9000 + b": 1")),
    ("200 headers", TOO_LARGE, _post(*GOOD, *(b"X%d: 1" % i for i in range(200)))),
    ("5000 headers", TOO_LARGE, _post(*GOOD, *(b"X%d: 1" % i for i in range(5000)))),
    ("huge cookie", TOO_LARGE, _post(*GOOD, b"Cookie: " + b"a=b; " * 4000)),
    ("key in UTF-8", NO_KEY, _post(HOST, "Authorization: Bearer schlüssel".encode(), JSON, LENGTH)),
    ("key in Latin-1", NO_KEY, _post(HOST, b"Authorization: Bearer \xe9\xff\x80abcdefgh", JSON, LENGTH)),
    ("key twice", NO_KEY, _post(HOST, AUTH, AUTH, JSON, LENGTH)),
    ("good key and bad key", NO_KEY, _post(HOST, AUTH, b"Authorization: Bearer x", JSON, LENGTH)),
    ("two schemes in one value", NO_KEY, _post(HOST, AUTH + b", Basic eDp5", JSON, LENGTH)),
    ("no key", NO_KEY, _post(HOST, JSON, LENGTH)),
    ("empty key", NO_KEY, _post(HOST, b"Authorization:", JSON, LENGTH)),
    ("scheme alone", NO_KEY, _post(HOST, b"Authorization: Bearer", JSON, LENGTH)),
    ("key without a scheme", NO_KEY, _post(HOST, b"Authorization: {key}", JSON, LENGTH)),
    ("Basic", NO_KEY, _post(HOST, b"Authorization: Basic {key}", JSON, LENGTH)),
    ("huge key", NO_KEY, _post(HOST, b"Authorization: Bearer " + b"k" * 8000, JSON, LENGTH)),
    ("key with SQL", NO_KEY, _post(HOST, b"Authorization: Bearer ' OR 1=1 --", JSON, LENGTH)),
    ("key with a wildcard", NO_KEY, _post(HOST, b"Authorization: Bearer *", JSON, LENGTH)),
    ("key with a newline escape", NO_KEY, _post(HOST, b"Authorization: Bearer abc%0d%0adef", JSON, LENGTH)),
    ("key with a space", NO_KEY, _post(HOST, AUTH + b" x", JSON, LENGTH)),
    ("key of the admin routes", NO_KEY, _post(HOST, b"Authorization: Bearer {admin}", JSON, LENGTH)),
    ("no key for the models", NO_KEY, _raw(b"GET /v1/models HTTP/1.1", HOST)),
    ("no key for the metrics", NO_KEY, _raw(b"GET /metrics HTTP/1.1", HOST)),
    ("a tenant's key for the metrics", (403, "permission_denied", None), _get(b"/metrics")),
    ("a tenant's key for the workers", (403, "permission_denied", None), _get(b"/admin/v1/workers")),
    ("type in Latin-1", NO_TYPE, _post(HOST, AUTH, b"Content-Type: \xff/\xfe", LENGTH)),
    ("type of semicolons", NO_TYPE, _post(HOST, AUTH, b"Content-Type: ;;;", LENGTH)),
    ("empty type", NO_TYPE, _post(HOST, AUTH, b"Content-Type:", LENGTH)),
    ("form type", NO_TYPE, _post(HOST, AUTH, b"Content-Type: application/x-www-form-urlencoded", LENGTH)),
    ("multipart type", NO_TYPE, _post(HOST, AUTH, b"Content-Type: multipart/form-data; boundary=" + b"x" * 500, LENGTH)),
    ("text type", NO_TYPE, _post(HOST, AUTH, b"Content-Type: text/plain", LENGTH)),
    ("XML type", NO_TYPE, _post(HOST, AUTH, b"Content-Type: application/xml", LENGTH)),
    ("two types", MALFORMED, _post(*GOOD, b"Content-Type: text/plain")),
    *((f"encoding {coding}", NO_TYPE, _post(*GOOD, b"Content-Encoding: " + coding.encode("latin-1")))
      for coding in ("gzip", "deflate", "br", "zstd", "compress", "gzip, gzip", "identity, gzip", "\xff", "x")),
    ("two encodings", NO_TYPE, _post(*GOOD, b"Content-Encoding: identity", b"Content-Encoding: gzip")),
    ("unknown expectation", (417, "expectation_failed", None), _post(*GOOD, b"Expect: everything")),
    ("expectation in Latin-1", (417, "expectation_failed", None), _post(*GOOD, b"Expect: \xff")),
    ("expectation on a wrong route", (417, "expectation_failed", None), _get(b"/nowhere", b"Expect: x")),
    ("expectation without a key", NO_KEY, _post(HOST, JSON, LENGTH, b"Expect: 100-continue")),
    ("websocket", NO_KEY, _raw(b"GET /v1/models HTTP/1.1", HOST, b"Upgrade: websocket", b"Connection: Upgrade",
                              b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13", body=b"\x81\x05Hello")),
    ("Accept in Latin-1", SERVED, _post(*GOOD, b"Accept: \xff")),
    ("odd cookie", SERVED, _post(*GOOD, b"Cookie: \xff=\xfe; a=b; =;;")),
    ("odd range", SERVED, _post(*GOOD, b"Range: bytes=x-")),
    ("odd date", SERVED, _post(*GOOD, b"If-Modified-Since: yesterday")),
    ("odd forwarding", SERVED, _post(*GOOD, b"X-Forwarded-For: \xff, ''", b'Forwarded: for="', b"X-Real-Ip: ::::")),
    ("two request ids", SERVED, _post(*GOOD, b"X-Request-Id: a", b"X-Request-Id: b")),
    ("two sessions", SESSION, _post(*GOOD, b"X-Session-Affinity: a", b"X-Session-Affinity: a")),
    ("session in Latin-1", SESSION, _post(*GOOD, b"X-Session-Affinity: \xe9")),
    ("session in UTF-8", SESSION, _post(*GOOD, "X-Session-Affinity: sitzung-ü".encode())),
    ("empty session", SESSION, _post(*GOOD, b"X-Session-Affinity:")),
    ("huge session", SESSION, _post(*GOOD, b"X-Session-Affinity: " + b"s" * 4000)),
    ("session with a space", SESSION, _post(*GOOD, b"X-Session-Affinity: a b")),
    ("longest session", SERVED, _post(*GOOD, b"X-Session-Affinity: " + b"~" * 256)),
    ("request id in Latin-1", SERVED, _post(*GOOD, b"X-Request-Id: \xe9")),
    ("odd trace context", SERVED, _post(*GOOD, b"traceparent: \xff", b"tracestate: ,,,=")),
    ("odd charset", SERVED, _post(HOST, AUTH, JSON + b"; charset=nope", LENGTH)),
    ("h2c", SERVED, _post(*GOOD, b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMA")),
]  # fmt: skip

FRAMING = [
    *((f"Content-Length {value!r}", MALFORMED, _post(HOST, AUTH, JSON, b"Content-Length: " + value))
      for value in (b"+5", b"-1", b"0x5", b"5,5", b"5 5", b"", b"1e3", b"\xb2", b"5;", b"18446744073709551617", b"5\x0b")),
    ("Content-Length of an exabyte", (413, "request_too_large", None), _post(HOST, AUTH, JSON, b"Content-Length: 9223372036854775807")),
    ("two lengths", MALFORMED, _post(*GOOD, LENGTH)),
    ("two different lengths", MALFORMED, _post(*GOOD, b"Content-Length: 1")),
    ("length and chunks", MALFORMED, _post(*GOOD, CHUNKED, body=b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")),
    ("chunks and length", MALFORMED, _post(HOST, AUTH, JSON, CHUNKED, b"Content-Length: 6", body=b"0\r\n\r\nG")),
    ("space before the coding's colon", MALFORMED, _post(HOST, AUTH, JSON, b"Transfer-Encoding : chunked", body=b"0\r\n\r\n")),
    ("two codings", MALFORMED, _post(HOST, AUTH, JSON, CHUNKED, b"Transfer-Encoding: identity", body=b"0\r\n\r\n")),
    *((f"coding {value!r}", MALFORMED, _post(HOST, AUTH, JSON, b"Transfer-Encoding: " + value, body=b"0\r\n\r\n"))
      for value in (b"identity", b"xchunked", b"chunkedx", b"chunked, identity", b"gzip, chunked", b"chunked, chunked", b"\x0bchunked",
                    b"gzip", b'"chunked"', b"chunked;q=1", b"\xffchunked")),
    ("chunks in HTTP/1.0", MALFORMED, _raw(b"POST /v1/chat/completions HTTP/1.0", HOST, AUTH, JSON, CHUNKED, body=b"0\r\n\r\n")),
    *((f"chunk {value[:12]!r}", MALFORMED, _post(HOST, AUTH, JSON, CHUNKED, body=value))
      for value in (b"+2\r\n{}\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n", b"-1\r\n", b"f" * 17 + b"\r\n", b"2\n{}\n0\n\n", b"2\r\n{}0\r\n\r\n",
                    b"2\r\n{}x\r\n0\r\n\r\n", b"zz\r\n", b"\r\n", b"2 \r\n{}\r\n0\r\n\r\n", b"1\r\n{}\r\n0\r\n\r\n", b"\xff\r\n", b"2\r{}\r\n")),
    ("huge trailer", TOO_LARGE, _post(HOST, AUTH, JSON, CHUNKED, body=b"2\r\n{}\r\n0\r\nX: " + b"a" * 20000 + b"\r\n\r\n")),
    ("500 trailers", TOO_LARGE, _post(HOST, AUTH, JSON, CHUNKED, body=b"2\r\n{}\r\n0\r\n" + b"X: 1\r\n" * 500 + b"\r\n")),
    ("huge chunk extension", (400, None, "model"), _post(HOST, AUTH, JSON, CHUNKED, body=b"2;" + b"x" * 20000 + b"\r\n{}\r\n0\r\n\r\n")),
    ("a trailer with a key", (400, None, "model"), _post(HOST, AUTH, JSON, CHUNKED, body=b"2\r\n{}\r\n0\r\nAuthorization: x\r\n\r\n")),
]  # fmt: skip


# What a tenant may ask of its usage.
USAGE = [
    *((f"usage {query}", SERVED, _get(f"/v1/usage?{query}".encode())) for query in (
        "to=253402300799", "by=hour&from=253402300000&to=253402300799", "by=request&to=253402300799", "to=1", "by=hour&to=1", "by=request&to=1",
        "by=request&from=0&to=1", "by=request&limit=10000", "format=csv&by=request&from=9999-12-31&to=9999-12-31T23:59:59.999Z")),
    *((f"usage {query}", (400, None, param), _get(f"/v1/usage?{query}".encode())) for query, param in (
        ("to=0", "from"), ("from=5&to=5", "from"), ("from=253402300800", "from"), ("to=9999-12-31T23:59:59-23:59", "to"), ("from=0001-01-01", "from"),
        ("from=-1", "from"), ("from=1e5", "from"), ("from=nan", "from"), ("from=%00", "from"), ("from=%D9%A1", "from"), ("from=", "from"), ("to=" + "9" * 400, "to"),
        ("by=hour&from=0", "from"), ("by=month", "by"), ("by=day&by=hour", "by"), ("limit=0", "limit"), ("limit=10001", "limit"), ("limit=%2B1", "limit"),
        ("limit=1.0", "limit"), ("format=xml", "format"), ("tenant=other", "tenant"), ("%ff=1", "\ufffd"), ("=1", ""))),
]  # fmt: skip


def _filled(raw: bytes, front) -> bytes:
    return raw.replace(b"{key}", front.key.encode()).replace(b"{admin}", front.admin_key.encode())


async def _wrong_rows(front, rows) -> list:
    """Rows whose answer is another one than expected."""
    wrong = []
    for name, (status, code, param), raw in rows:
        answer = await front.send(_filled(raw, front))
        error = answer.error or {}
        seen = (answer.status, error.get("code"), error.get("param"))
        if seen != (status, code, param) or (status != 200 and not error) or "x-request-id" not in answer.headers:
            wrong.append((name, seen, answer.body[:200]))
    return wrong


async def test_request_lines(front, unharmed):
    """Every odd request line has its 4xx in OpenAI's shape."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, REQUEST_LINES)


async def test_headers(front, unharmed):
    """Every odd header has its 4xx in OpenAI's shape, or is of no consequence; none is quoted in the log."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, HEADERS)
    log = running.log.read_text()
    assert running.key not in log
    assert "kkkkkkkk" not in log
    assert "Traceback" not in log


async def test_framing(front, unharmed):
    """Every length and coding that could be read in two ways is refused, and what follows it on the connection is no request."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, FRAMING)
        smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        for name, expected, raw in FRAMING:
            if expected != MALFORMED:
                continue
            answer = await running.everything(_filled(raw, running) + smuggled)
            assert 1 >= answer.count(b"HTTP/1.1 "), (name, answer)


async def test_questions_about_usage(front, unharmed):
    """Times, ranges and names that can't be are a 400 that names them; none of them makes the gateway take Redis for lost."""
    running = await front()
    async with unharmed(running):
        assert [] == await _wrong_rows(running, USAGE)
    assert "redis_unreachable" not in running.log.read_text()


async def test_a_long_list_of_usage(front, unharmed):
    """Ten thousand rows, again and again, hold up nobody's stream."""
    running = await front()
    await _fill_usage(running, 10_000)
    async with unharmed(running):
        for form in ("json", "csv") * 3:
            raw = running.head(path=f"/v1/usage?by=request&limit=10000&format={form}", method="GET")
            answer = await running.send(raw)
            assert 200 == answer.status
            assert 9_900 < answer.body.count(b"a-request")


async def _fill_usage(running, count: int) -> None:
    now_ms = int(time.time() * 1000)
    row = UsageRow(
        "a-request", TenantId("acme"), "key_1", ModelName("tiny/chat"), "completed", "", 1, now_ms, now_ms, 9, 5, 4, 3, 2, 2, 2,
    )  # fmt: skip
    fields = row.to_fields()
    async with Redis.from_url(running.redis_url) as client:
        pipeline = client.pipeline(transaction=False)
        for _ in range(count):
            pipeline.execute_command("XADD", KeySpace().usage_rows(TenantId("acme")), "*", *fields)
        await pipeline.execute()


def test_the_table_is_long():
    """Kinds and neighbours of kinds."""
    assert 170 < len(REQUEST_LINES) + len(HEADERS) + len(FRAMING) + len(USAGE)
