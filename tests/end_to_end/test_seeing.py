"""What operators see of a real stack: traces through both processes, metrics, logs; and what nobody must see anywhere."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import redis
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

CANARY_KEY = "sk-sg-CANARYKEYCANARYKEYCANARYKEYCANARYKEY"
CANARY_PROMPT = "CANARYPROMPT"
CANARY_SALT = "CANARYSALT"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OpenTelemetry collector that keeps what it's sent."""

    def __init__(self) -> None:
        bodies = self.bodies = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self) -> list:
        parsed = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for one in parsed
            for found in one.resource_spans
            for scope in found.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def _post(stack, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, bytes]:
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {stack.key}", **headers}
    request = urllib.request.Request(stack.url + path, data=body, headers=sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _chat(stack, **fields: object) -> bytes:
    body = {"model": stack.model, "max_tokens": 8, "messages": [{"role": "user", "content": CANARY_PROMPT}], **fields}
    return json.dumps(body).encode()


def test_a_trace_goes_through_both_processes(new_stack, collector, monkeypatch) -> None:
    """The client's trace has the gateway's span under it, and the worker's under that; without ids of a client it is a new trace."""
    monkeypatch.setenv("SLUICEGATE_TRACE_ENDPOINT", collector.url)
    stack = new_stack("traced")
    assert 200 == _post(stack, _chat(stack, stream=True), traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")[0]
    assert 400 == _post(stack, _chat(stack, temperature=9), traceparent="nonsense")[0]
    needed = ["POST /v1/chat/completions", "POST /v1/chat/completions", "worker.job"]
    stack.wait_for(lambda: needed == sorted(s.name for s in collector.spans() if s.name in needed), 20)
    spans = {span.name: span for span in collector.spans() if span.trace_id.hex() == TRACE_ID}
    assert {"POST /v1/chat/completions", "read body", "prepare", "worker.job"} == set(spans)
    request, job = spans["POST /v1/chat/completions"], spans["worker.job"]
    assert PARENT_ID == request.parent_span_id.hex()
    assert [request.span_id] * 3 == [spans[name].parent_span_id for name in ("read body", "prepare", "worker.job")]
    assert ["first_token"] == [event.name for event in job.events]
    assert request.start_time_unix_nano <= job.start_time_unix_nano <= job.end_time_unix_nano
    attributes = {item.key: item.value for item in job.attributes}
    assert 8 == attributes["sluicegate.completion_tokens"].int_value
    others = [span for span in collector.spans() if span.trace_id.hex() != TRACE_ID]
    assert "POST /v1/chat/completions" in {span.name for span in others}
    assert CANARY_PROMPT.encode() not in b"".join(collector.bodies)
    assert stack.key.encode() not in b"".join(collector.bodies)
    assert TRACE_ID in (stack.data / "logs" / "gateway.log").read_text()


def test_metrics_of_a_real_worker(stack) -> None:
    """Batch sizes and pages are those of the engine; no key, no metrics."""
    assert 200 == _post(stack, _chat(stack))[0]
    stack.wait_for(lambda: stack.metric("sluicegate_worker_batch_size_count") > 0, 5)
    assert stack.metric("sluicegate_worker_batch_size_sum") >= stack.metric("sluicegate_worker_batch_size_count")
    assert 1 == stack.metric("sluicegate_worker_up")
    assert stack.metric("sluicegate_worker_pages", state="total") > 0
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{stack.url}/metrics", timeout=10)
    error.value.close()
    assert 401 == error.value.code


def test_canaries(new_stack, monkeypatch) -> None:
    """Keys, prompts and salts, in good and in failing requests of every kind, at the most talkative log level: in no log, reply, metric or file."""
    monkeypatch.setenv("SLUICEGATE_LOG_LEVEL", "debug")
    stack = new_stack("canaries")
    replies = [_fail(stack, body, headers) for body, headers in _requests(stack)]
    replies += [_raw(stack, raw) for raw in _malformed(stack)]
    _leave_in_the_middle(stack)
    _kill_the_worker(stack)
    request = urllib.request.Request(
        stack.url + "/metrics", headers={"Authorization": f"Bearer {stack.info['admin_key']}"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        replies.append(response.read())
    seen = {"replies": b"".join(replies), "redis": _redis(stack), "files": _files(stack.data)}
    secrets = [CANARY_KEY, CANARY_PROMPT, CANARY_SALT, stack.key, stack.info["admin_key"]]
    secrets.append((stack.data / "secrets" / "master.key").read_text().strip())
    for place, raw in seen.items():
        for secret in secrets:
            assert secret.encode() not in raw, (place, secret[:12])
    log = (stack.data / "logs" / "gateway.log").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert {"http_request_id", "tenant", "route", "status"} <= set.union(
        *(set(line) for line in lines if line["event"] == "http_request")
    )


def _requests(stack) -> Iterator[tuple[bytes, dict]]:
    salt = {"cache_salt": CANARY_SALT}
    bodies = [
        _chat(stack, temperature=0, max_tokens=1, **salt), _chat(stack, temperature=9, **salt), _chat(stack, stop=[5]), _chat(stack, tools=[{"type": CANARY_PROMPT}]),
        _chat(stack, n=0), _chat(stack, max_tokens=10**6), _chat(stack, messages=[{"role": CANARY_PROMPT, "content": CANARY_PROMPT}]), _chat(stack, timeout=0.001),
        _chat(stack, messages=[{"role": "user", "content": CANARY_PROMPT * 20_000}]), _chat(stack, messages=[{"role": "user", "content": [{"type": CANARY_PROMPT}]}]),
        _chat(stack, logit_bias={CANARY_PROMPT: 1}), _chat(stack, api_key=CANARY_KEY), _chat(stack, stop=CANARY_PROMPT * 200), _chat(stack)[:-5], _chat(stack) + b"x",
        f'{{"{CANARY_PROMPT}'.encode(), CANARY_PROMPT.encode(), b"\xff" + _chat(stack), _chat(stack, messages=[{"role": "user", "content": CANARY_PROMPT + "\ud800"}]),
    ]  # fmt: skip
    for body in bodies:
        yield body, {}
        yield body, {"Authorization": f"Bearer {CANARY_KEY}"}
        yield body, {"Authorization": f"Basic {CANARY_KEY}"}
    yield bodies[0], {"Content-Type": CANARY_KEY}
    yield bodies[0], {"X-Request-Id": CANARY_KEY + ":" + CANARY_PROMPT, "X-Api-Key": CANARY_KEY, "Cookie": CANARY_KEY}


def _fail(stack, body: bytes, headers: dict) -> bytes:
    """The reply. One that repeats the prompt would be the model's own words: greedy with one token it can't."""
    return _post(stack, body, f"/v1/chat/completions?key={CANARY_KEY}", **headers)[1]


def _malformed(stack) -> Iterator[bytes]:
    auth = f"Authorization: Bearer {stack.key}\r\nX-Key: {CANARY_KEY}"
    body = CANARY_PROMPT.encode()
    for head in (
        f"POST /{CANARY_KEY} HTTP/9\r\n{auth}", f"{CANARY_KEY}\r\n", f"POST / HTTP/1.1\r\n{auth}\x00", f"POST / HTTP/1.1\r\n{auth}\r\n{CANARY_PROMPT}",
        f"POST / HTTP/1.1\r\n{auth}{'x' * 9000}", f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{auth}\r\nTransfer-Encoding: {CANARY_KEY}",
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{auth}\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json", f"GET /{CANARY_KEY} HTTP/1.1\r\nHost: x\r\n{auth}",
    ):  # fmt: skip
        yield head.encode("latin-1") + b"\r\n\r\n" + body


def _connect(stack) -> socket.socket:
    host, _, port = stack.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def _raw(stack, raw: bytes) -> bytes:
    with _connect(stack) as connection, contextlib.suppress(TimeoutError, ConnectionError):
        connection.sendall(raw)
        connection.settimeout(1)
        return connection.recv(1 << 20)
    return b""


def _leave_in_the_middle(stack) -> None:
    body = _chat(stack, stream=True, max_tokens=200)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for size in (20, len(body)):
        with _connect(stack) as connection:
            connection.sendall(head.encode() + body[:size])
            if size == len(body):
                connection.recv(100)


def _kill_the_worker(stack) -> None:
    """In the middle of an answer; then until another serves."""
    (pid,) = stack.info["pids"]["workers"]
    body = _chat(stack, stream=True, max_tokens=400)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with _connect(stack) as connection:
        connection.sendall(head.encode() + body)
        connection.recv(100)
        os.kill(pid, signal.SIGKILL)
        connection.settimeout(30)
        with contextlib.suppress(TimeoutError):
            while b"[DONE]" not in connection.recv(65536):
                pass
    stack.wait_for(lambda: _post(stack, _chat(stack, temperature=0, max_tokens=1))[0] == 200, 60)
    time.sleep(1)  # replies and usage of the ended ones are settled in the background


def _redis(stack) -> bytes:
    with redis.Redis.from_url(stack.info["redis_url"]) as client:
        return b"".join(key + (client.dump(key) or b"") for key in client.scan_iter("*"))


def _files(data: Path) -> bytes:
    """All that the stack has written, but for the secrets' own places."""
    paths = [
        path
        for path in data.rglob("*")
        if path.is_file() and path.parent.name != "secrets" and path.name not in ("stack.json", "up.log")
    ]
    return b"".join(path.read_bytes() for path in paths)
