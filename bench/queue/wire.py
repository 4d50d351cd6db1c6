"""An HTTP client that costs next to nothing, so that what's measured is the server: one connection, one request at a time, no parsing beyond
the end of the answer."""

import asyncio
import re
import time
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter`. `num_tokens` is what the answer's usage says, 0 if it has none."""

    sent_s: float
    first_byte_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    num_bytes: int = 0
    num_events: int = 0
    tail: bytes = field(default=b"", repr=False)

    @property
    def num_tokens(self) -> int:
        """Completion tokens by the usage at the end of the answer."""
        found = re.search(rb'"completion_tokens": ?(\d+)', self.tail)
        return int(found[1]) if found else 0


class Connection(asyncio.Protocol):
    """Keeps its connection; `ask` sends a whole request and waits for the end of the answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._answer = Answer(0.0)
        self._head = b""
        self._num_left: int | None = None  # of a body with a length; None while it comes in chunks
        self._is_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, raw: bytes) -> Answer:
        """The answer to a request; raises ConnectionError if the server closes the connection."""
        assert self._transport is not None
        self._head, self._num_left, self._is_body = b"", None, False
        self._done = asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self._transport.write(raw)
        return await self._done

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._is_body:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._begin_body(head)
        if data:
            self._take(data)
        if self._num_left is not None and self._num_left <= 0:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def _begin_body(self, head: bytes) -> None:
        self._is_body = True
        self._answer.status = int(head[9:12])
        length = _LENGTH.search(head)
        self._num_left = int(length[1]) if length else None

    def _take(self, data: bytes) -> None:
        answer = self._answer
        if not answer.first_byte_s:
            answer.first_byte_s = time.perf_counter()
        answer.num_bytes += len(data)
        answer.num_events += data.count(b"data: ")
        answer.tail = (answer.tail + data)[-1024:]
        if self._num_left is not None:
            self._num_left -= len(data)
        elif answer.tail.endswith(_LAST_CHUNK):
            self._finish()

    def _finish(self) -> None:
        self._answer.end_s = time.perf_counter()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)


async def connect(port: int) -> Connection:
    """A connection to a server on this machine."""
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return protocol


def request(path: str, body: bytes, key: str = "") -> bytes:
    """A whole POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
