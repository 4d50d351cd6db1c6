"""Around every request: its id, its errors in one shape, its line in the log, its count."""

import asyncio
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from gateway.error_response import error_response, from_http
from gateway.errors import ApiError, crashed
from gateway.framing import check_framing
from gateway.parts import PARTS

_log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Where a route leaves the x-ratelimit headers of an admitted request.
RATE_HEADERS = web.RequestKey("rate_headers", dict[str, str])
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one middleware."""
    request_id = _request_id(request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(http_request_id=request_id)
    started_s = time.monotonic()
    status = 499  # what is counted if the client leaves
    try:
        with request.app[PARTS].tracing.request(request, _route(request)) as span:
            response = await _handled(request, handler)
            status = response.status
            if span is not None:
                span.set_attribute("http.response.status_code", status)
    except (ConnectionError, asyncio.CancelledError) as error:
        # aiohttp leaves the exception in a reference cycle; half a body or an unread answer must not wait there for the collector.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        route = _route(request)
        request.app[PARTS].metrics.request(route, status)
        if route not in ("/health/live", "/health/ready", "/metrics"):
            _log.info("http_request", route=route, status=status, seconds=round(time.monotonic() - started_s, 4))
    if not response.prepared:
        response.headers["x-request-id"] = request_id
    return response


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For streams, whose headers leave before the middleware sees the response."""
    response.headers.update(request.get(RATE_HEADERS, {}))
    bound = structlog.contextvars.get_contextvars().get("http_request_id")
    if bound and "x-request-id" not in response.headers:
        response.headers["x-request-id"] = bound


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        check_framing(request)
        return await handler(request)
    except ApiError as error:
        response = error_response(error)
        if error.code == "malformed_request":
            response.force_close()  # where this request ends is not certain
        return response
    except web.HTTPException as error:
        return error_response(from_http(error))
    except ConnectionError:
        raise  # the client has gone; there's nobody to answer
    except Exception as error:
        _log.exception("request_crashed", error=type(error).__name__)
        return error_response(crashed())


def _request_id(request: web.Request) -> str:
    """The client's id if it is short and clean: it is echoed and logged, and used for nothing else."""
    given = request.headers.get("X-Request-Id", "")
    return given if _CLIENT_ID.fullmatch(given) else "req_" + secrets.token_hex(12)


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
