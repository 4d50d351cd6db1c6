"""Reading a request's body: within a size, within a time, of the right type, and all bodies together within the memory that there is for them."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.web_exceptions import HTTPExpectationFailed
from aiohttp.web_protocol import RequestPayloadError

from gateway.errors import ApiError, bad_request, overloaded
from protocol.ids import TenantId

_JSON_TYPES = ("application/json", "text/json")
RETRY_AFTER_S = 1


class BodyMemory:
    """Counts the bytes of bodies that are being received or prepared. One tenant gets half of them at most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[TenantId] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._held.total()

    @contextmanager
    def share(self, tenant: TenantId) -> Iterator["BodyShare"]:
        """Memory for one body, given back at the end of the block."""
        share = BodyShare(self, tenant)
        try:
            yield share
        finally:
            self._held[tenant] -= share.num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def add(self, tenant: TenantId, num_bytes: int) -> None:
        """Count bytes that have come; raises ApiError 429 if they're too many."""
        if self._held.total() + num_bytes > self._max_bytes or self._held[tenant] + num_bytes > self._max_bytes // 2:
            raise overloaded("Too many large requests are being received; try again.", RETRY_AFTER_S)
        self._held[tenant] += num_bytes


class BodyShare:
    """One body's part."""

    def __init__(self, memory: BodyMemory, tenant: TenantId) -> None:
        self._memory = memory
        self._tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes of this body."""
        self._memory.add(self._tenant, num_bytes)
        self.num_bytes += num_bytes


async def expect_later(request: web.Request) -> None:
    """For `Expect: 100-continue`: the body is asked for by `read_body`, when the key is known to be good."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise HTTPExpectationFailed


async def read_body(request: web.Request, max_bytes: int, timeout_s: float, share: BodyShare | None = None) -> bytes:
    """The body's bytes, counted in a tenant's share if one is given; raises ApiError 400, 408, 413, 415 or 429."""
    _check_head(request, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            if "Expect" in request.headers and request.can_read_body:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # no part of the answer
            return await _read(request, max_bytes, share)
    except TimeoutError:
        raise _refused(
            408, f"The request body did not arrive within {timeout_s:g} seconds.", "request_timeout"
        ) from None
    except (RequestPayloadError, web.PayloadAccessError):
        raise bad_request("The request body's transfer encoding is broken.", code="malformed_request") from None


async def _read(request: web.Request, max_bytes: int, share: BodyShare | None) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.content.iter_any():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        if share is not None:
            share.add(len(part))
        parts.append(part)
    return b"".join(parts)


def _check_head(request: web.Request, max_bytes: int) -> None:
    kind = request.content_type
    if "Content-Type" in request.headers and kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise _refused(
            415, "Send the request body as JSON, with 'Content-Type: application/json'.", "unsupported_media_type"
        )
    if any(value.lower() != "identity" for value in request.headers.getall("Content-Encoding", [])):
        raise _refused(415, "Compressed request bodies are not supported.", "unsupported_media_type")
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes)


def too_large(max_bytes: int) -> ApiError:
    """413."""
    return _refused(413, f"The request body is larger than {max_bytes} bytes.", "request_too_large")


def _refused(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, "invalid_request_error", code)
