"""A gateway process as `sluicegate gateway` starts it, with a scripted worker behind it and a healthy stream beside what a test does to it.

`front` starts it. Requests go over raw sockets, byte for byte. At the end the process must still serve, must not have grown by 20 MB, and the stream must
not have been held up for 250 ms.
"""

import asyncio
import bisect
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.tenant_store import TenantStore
from protocol.ids import TenantId
from protocol.key_space import KeySpace
from protocol.signing import derive_key

MASTER = b"m" * 32
ADMIN_KEY = "admin-key-of-the-hostile-tests"
MAX_GROWTH_BYTES = 20 * 1024 * 1024
MEMORY_SETTLES_S = 15.0
MAX_GAP_S = 0.25
NUM_GAPS = 50  # the longest ones, of which the longest is looked for
TICK_S = 0.02


@dataclass(frozen=True)
class Answer:
    """What came back; status 0 if the connection was closed without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object, if the answer has exactly OpenAI's shape and type."""
        try:
            value = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return None
        is_json = self.headers.get("content-type", "").startswith("application/json")
        is_error = isinstance(value, dict) and set(value) == {"message", "type", "param", "code"}
        return value if is_json and is_error else None


@dataclass
class Front:
    """The running process."""

    pid: int
    port: int
    key: str
    log: Path
    redis_url: str
    worker: Any = None
    gaps_s: list[tuple[float, float]] = field(default_factory=list)
    stalls_s: list[tuple[float, float]] = field(default_factory=list)
    waits_s: list[tuple[float, float]] = field(default_factory=list)
    metrics_port: int = 0
    admin_key: str = ADMIN_KEY

    async def send(self, *parts: bytes, timeout_s: float = 20.0, ends: bool = False) -> Answer:
        """Write parts on a new connection and read one answer; `ends` closes our side after the last part."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(
                    ConnectionError
                ):  # refused while we still wrote: the answer is there all the same
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                    if ends:
                        writer.write_eof()
                return await read_answer(reader)
        finally:
            writer.transport.abort()

    async def read(self, reader: asyncio.StreamReader) -> Answer:
        """The next answer on a connection."""
        return await read_answer(reader)

    async def everything(self, raw: bytes, timeout_s: float = 3.0) -> bytes:
        """All that comes back on a connection until it's closed, or for so long."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received = bytearray()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                writer.write(raw)
                while part := await reader.read(65536):
                    received += part
        writer.transport.abort()
        return bytes(received)

    def head(self, *lines: str | bytes, path: str = "/v1/chat/completions", method: str = "POST") -> bytes:
        """A request head with a good key; `lines` follow it."""
        fixed = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self.key}"]
        return b"\r\n".join(line.encode() if isinstance(line, str) else line for line in [*fixed, *lines, "", ""])

    def request(self, body: bytes, *lines: str, path: str = "/v1/chat/completions") -> bytes:
        """A whole request."""
        return self.head("Content-Type: application/json", f"Content-Length: {len(body)}", *lines, path=path) + body

    async def is_well(self) -> bool:
        """Whether an ordinary request is answered."""
        body = json.dumps({"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}]}).encode()
        return (await self.send(self.request(body))).status == 200

    def longest_gap_s(self) -> float:
        """The longest time between two pieces of the healthy stream, less what isn't the gateway's of it: that the test's own loop stood still, or that
        others had the processors.
        """
        longest = sorted(self.gaps_s, key=lambda gap: gap[0] - gap[1])[:NUM_GAPS]
        return max(end - begin - max(self._stalled_s(begin, end), self._waited_s(begin, end)) for begin, end in longest)

    def _stalled_s(self, begin: float, end: float) -> float:
        return sum(max(min(end, woke) - max(begin, due), 0.0) for due, woke in self.stalls_s)

    def _waited_s(self, begin: float, end: float) -> float:
        """How long the gateway was ready to run between two moments and didn't."""
        before = bisect.bisect_left(self.waits_s, (begin,)) - 1
        after = min(bisect.bisect_left(self.waits_s, (end,)), len(self.waits_s) - 1)
        return self.waits_s[after][1] - self.waits_s[max(before, 0)][1]

    def memory_bytes(self) -> int:
        """Resident memory of the process and its intake processes."""
        return sum(_resident_bytes(pid) for pid in [self.pid, *_children(self.pid)])


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One HTTP answer, interim ones left out."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(0, {}, b"")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        if status != 100:
            break
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Answer(status, headers, b"")


def _resident_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/statm").read_text()
    except OSError:
        return 0
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _waited_s(pid: int) -> float:
    """How long a process' main thread was ready to run and didn't, since it began."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def tick_or_answer(worker: Any, job: Any) -> None:
    """The healthy stream ticks for as long as it's read; everybody else gets a short answer."""
    if job.tenant == "healthy":
        from protocol.replies import Delta, Started

        await worker.send(job, Started(worker.worker_id))
        while True:
            await worker.send(job, Delta(0, "tick ", (1,)))
            await asyncio.sleep(TICK_S)
    await worker.answer(job, ["Hel", "lo"])


async def _healthy_stream(front: Front, key: str) -> None:
    """Reads one stream for ever and notes the times between its pieces."""
    body = json.dumps({"model": "tiny/chat", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        request = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        writer.write(f"{request}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"tick ")
        last_s = time.monotonic()
        while await reader.read(65536):
            now_s = time.monotonic()
            front.gaps_s.append((last_s, now_s))
            last_s = now_s
        raise AssertionError("the healthy stream ended")
    finally:
        writer.transport.abort()


async def _keep_time(front: Front) -> None:
    """Notes when this loop, which holds worker, clients and reader, stood still: no piece can come or be read then. And how long the gateway has waited
    for a processor so far.
    """
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        if (woke_s := time.monotonic()) > due_s + TICK_S / 4:
            front.stalls_s.append((due_s, woke_s))
        front.waits_s.append((woke_s, _waited_s(front.pid)))


@pytest.fixture
async def front(own_valkey, worker, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Front]]]:
    """To start the process: call with the flags that differ."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*flags: str, script: Any = tick_or_answer, max_request_tokens: int = 1000) -> Front:
            server = own_valkey()
            url = f"redis://127.0.0.1:{server.port}/0"
            keys = KeySpace()
            made = await worker(
                script, url=url, keys=keys, signing_key=derive_key(MASTER, "job-signing"),
                max_request_tokens=max_request_tokens,
            )  # fmt: skip
            client = await stack.enter_async_context(Redis.from_url(url))
            store = TenantStore(client, keys, derive_key(MASTER, "api-key-pepper"))
            secrets = {}
            for name in ("acme", "healthy"):
                await store.create_tenant(TenantId(name), name)
                secrets[name] = (await store.create_key(TenantId(name), "test")).secret
            front = Front(0, _free_port(), secrets["acme"], tmp_path / "gateway.log", url, made)
            await _start_process(stack, front, url, tmp_path, flags)
            ticking = asyncio.create_task(_healthy_stream(front, secrets["healthy"]))
            stack.push_async_callback(_end, ticking)
            stack.push_async_callback(_end, asyncio.create_task(_keep_time(front)))
            await _until_it_ticks(front)
            return front

        yield start


async def _start_process(
    stack: contextlib.AsyncExitStack, front: Front, url: str, folder: Path, flags: Iterable[str]
) -> None:
    environment = {
        **os.environ, "SLUICEGATE_REDIS_URL": url, "SLUICEGATE_DATA": str(folder / "data"),
        "SLUICEGATE_MASTER_KEY": MASTER.hex(), "SLUICEGATE_ADMIN_KEY": ADMIN_KEY,
    }  # fmt: skip
    log = stack.enter_context(front.log.open("wb"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sluicegate", "gateway", "--port", str(front.port), *flags, env=environment, stderr=log,
    )  # fmt: skip
    front.pid = process.pid

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    async with asyncio.timeout(30):
        while True:
            assert process.returncode is None, front.log.read_text()
            with contextlib.suppress(OSError):
                if (await front.send(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200:
                    return
            await asyncio.sleep(0.1)


async def _until_it_ticks(front: Front) -> None:
    async with asyncio.timeout(20):
        while not front.gaps_s:
            await asyncio.sleep(TICK_S)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def unharmed() -> Callable[[Front], Any]:
    """A block after which the process must be what it was before; `warm` requests come first, so that caches are filled."""

    @contextlib.asynccontextmanager
    async def watch(front: Front) -> AsyncIterator[None]:
        for _ in range(20):
            assert await front.is_well()
        before = front.memory_bytes()
        front.gaps_s.clear()
        front.stalls_s.clear()
        yield
        assert await front.is_well()
        end_s = time.monotonic() + MEMORY_SETTLES_S
        while (growth := front.memory_bytes() - before) >= MAX_GROWTH_BYTES and time.monotonic() < end_s:
            await asyncio.sleep(0.5)
        assert growth < MAX_GROWTH_BYTES, f"{growth / 1e6:.1f} MB more than before"
        await _until_it_ticks(front)
        gap_s, whole_s = front.longest_gap_s(), max(end - begin for begin, end in front.gaps_s)
        print(
            f"{growth / 1e6:+.1f} MB, longest gap of the stream {gap_s * 1000:.0f} ms ({whole_s * 1000:.0f} with what isn't ours)"
        )
        assert gap_s < MAX_GAP_S

    return watch
