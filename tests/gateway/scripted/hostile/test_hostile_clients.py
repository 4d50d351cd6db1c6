"""Clients that are slow, idle, many, impatient or deaf."""

import asyncio
import contextlib
import json
import re
import socket
from pathlib import Path

from protocol.replies import Delta, Done, Started

BODY = json.dumps({"model": "tiny/chat", "messages": [{"role": "user", "content": "Hi"}]}).encode()
NUM_SLOW = 200
NUM_IDLE = 3000
MAX_CONNECTIONS = 1000


async def _dribble(front, first: bytes, rest: bytes, every_s: float = 0.2) -> tuple[int, str]:
    """Send a request byte by byte until it's answered; returns status and code."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(first)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            for byte in rest:
                writer.write(bytes([byte]))
                await asyncio.sleep(every_s)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(30):
        answer = await front.read(reader)
    dripping.cancel()
    writer.transport.abort()
    return answer.status, answer.error["code"]


async def test_slow_heads(front, unharmed):
    """Heads that arrive byte by byte are a 408 when their time is up."""
    running = await front("--head-timeout", "1")
    async with unharmed(running):
        slow = [_dribble(running, b"", running.head("Content-Length: 5")) for _ in range(NUM_SLOW)]
        empty = [_dribble(running, b"\r\n", b"\r\n" * 100) for _ in range(10)]
        assert {(408, "request_timeout")} == set(await asyncio.gather(*slow, *empty))


async def test_slow_bodies(front, unharmed):
    """Bodies that arrive byte by byte are a 408 when their time is up, with a length or in chunks."""
    running = await front("--body-timeout", "1")
    plain = running.head("Content-Type: application/json", f"Content-Length: {len(BODY)}")
    chunked = running.head("Content-Type: application/json", "Transfer-Encoding: chunked") + b"%x\r\n" % len(BODY)
    async with unharmed(running):
        slow = [_dribble(running, head, BODY) for head in (plain, chunked) for _ in range(NUM_SLOW)]
        assert {(408, "request_timeout")} == set(await asyncio.gather(*slow))


async def test_thousands_of_idle_sockets(front, unharmed):
    """More connections than there may be: those that say nothing give way, those that work stay, and a newcomer is served at once."""
    running = await front("--max-connections", str(MAX_CONNECTIONS))
    async with unharmed(running):
        sockets = [socket.socket() for _ in range(NUM_IDLE)]
        try:
            for one in sockets:
                one.setblocking(False)
                await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", running.port))
            await asyncio.sleep(1)
            assert await running.is_well()
            assert MAX_CONNECTIONS + 100 >= len(list(Path(f"/proc/{running.pid}/fd").iterdir()))
        finally:
            for one in sockets:
                one.close()


async def test_too_many_busy_connections(front, unharmed, soon):
    """When all connections are busy a newcomer hears so, and is served when one has ended."""
    running = await front("--max-connections", "20", "--body-timeout", "2")
    async with unharmed(running):
        head = running.head("Content-Type: application/json", "Content-Length: 5")
        busy = [asyncio.create_task(running.send(head)) for _ in range(30)]
        answers = await asyncio.gather(*busy)
        assert {408, 503} == {answer.status for answer in answers}
        assert [] == [answer for answer in answers if not answer.error]
        await soon(running.is_well, timeout_s=20)  # a refused body is read and dropped for a moment


async def test_idle_connections_end(front, unharmed):
    """A connection without a request is closed, before its first request and after one."""
    running = await front("--idle-timeout", "1")
    async with unharmed(running):
        assert b"" == await running.everything(b"", timeout_s=20)
        assert (await running.everything(running.request(BODY), timeout_s=20)).startswith(b"HTTP/1.1 200")


async def _long_answer(worker, job) -> None:
    """8 MB of text, more than sockets hold, for everybody but the healthy stream."""
    if job.tenant == "healthy":
        await worker.send(job, Started(worker.worker_id))
        while True:
            await worker.send(job, Delta(0, "tick ", (1,)))
            await asyncio.sleep(0.02)
    count = 80 if job.sampling.seed == 20 else 1
    await worker.send(job, Started(worker.worker_id))
    for number in range(count):
        finish = "stop" if number == count - 1 else None
        await worker.send(job, Delta(0, "x" * 100_000 if count > 1 else "x", (number,), finish_reason=finish))
    await worker.send(job, Done(len(job.prompt_token_ids), 0, count))


def _held(front, sockets) -> bool:
    """Whether the gateway still has its side of one of these connections."""
    ports = {f"{one.getsockname()[1]:04X}" for one in sockets}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [row for row in rows if row[1].endswith(f":{front.port:04X}") and row[9] != "0"]
    return any(row[2].rpartition(":")[2] in ports for row in ours)


async def test_a_whole_answer_that_nobody_reads(front, unharmed, soon):
    """A client that takes nothing of a whole answer, or of a stream, is let go after its time; nothing stays in the process."""
    running = await front("--slow-reader", "1", script=_long_answer)
    async with unharmed(running):
        for stream in (False, True):
            body = json.dumps({**json.loads(BODY), "seed": 20, "stream": stream}).encode()
            deaf = [socket.socket() for _ in range(3)]
            for one in deaf:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", running.port))
                one.sendall(running.request(body))
            assert await running.is_well()

            assert _held(running, deaf)
            await soon(lambda deaf=deaf: not _held(running, deaf), timeout_s=30)
            for one in deaf:
                one.close()


async def test_pipelining(front, unharmed):
    """Requests in one write are answered in order; far too many of them by a client that reads nothing are not all taken in."""
    running = await front("--slow-reader", "2")
    get = running.head(path="/v1/models", method="GET")
    async with unharmed(running):
        answers = await running.everything(
            get * 49 + running.head("Connection: close", path="/v1/models", method="GET")
        )
        assert 50 == answers.count(b"HTTP/1.1 200 OK")
        for flood in (
            get * 20_000,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50_000,
            b"X" * 5_000_000,
            running.request(BODY) * 2000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(flood)
            await asyncio.sleep(0.5)
            writer.transport.abort()


async def test_connections_that_break(front, unharmed):
    """Resets at every moment of a request, hundreds of them, leave nothing behind."""
    running = await front()
    raw = running.request(BODY)
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    async with unharmed(running):
        for number in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.write(raw[: number * len(raw) // 299])
            if number % 3 == 0:
                await asyncio.sleep(0.005)
            writer.transport.abort()
    assert "request_crashed" not in running.log.read_text()


async def test_one_connection_for_many(front, unharmed):
    """Good and bad requests on one connection: each has its own answer."""
    running = await front()
    bad = BODY.replace(b"tiny/chat", b"tiny/nope")
    async with unharmed(running):
        answers = await running.everything((running.request(BODY) + running.request(bad)) * 20, timeout_s=5)
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answers)
        assert [b"200", b"404"] * 20 == statuses


async def test_big_bodies_leave_a_process_for_small_ones(front, unharmed):
    """Bodies of megabytes that take long never hold all intake processes, and a queue for one is not endless."""
    running = await front("--intake-wait", "1", max_request_tokens=10_000_000)
    big = json.dumps({**json.loads(BODY), "messages": [{"role": "user", "content": "word " * 2_500_000}]}).encode()
    async with unharmed(running):
        tasks = [asyncio.create_task(running.send(running.request(big), timeout_s=100)) for _ in range(4)]
        await asyncio.sleep(1)
        for _ in range(5):
            assert await running.is_well()
        answers = await asyncio.gather(*tasks)
        assert {200, 503, 400} >= {answer.status for answer in answers}
        assert 503 in {answer.status for answer in answers}
