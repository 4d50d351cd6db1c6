"""Reading a request's body: within a size, within a time, of the right type."""

import asyncio

from aiohttp import web

from gateway.errors import ApiError

_JSON_TYPES = ("application/json", "text/json")


async def read_body(request: web.Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body's bytes; raises ApiError 408, 413 or 415."""
    kind = request.content_type
    if "Content-Type" in request.headers and kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise _refused(
            415, "Send the request body as JSON, with 'Content-Type: application/json'.", "unsupported_media_type"
        )
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _refused(415, "Compressed request bodies are not supported.", "unsupported_media_type")
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise _refused(
            408, f"The request body did not arrive within {timeout_s:g} seconds.", "request_timeout"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(max_bytes) from None


def too_large(max_bytes: int) -> ApiError:
    """413."""
    return _refused(413, f"The request body is larger than {max_bytes} bytes.", "request_too_large")


def _refused(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, "invalid_request_error", code)
