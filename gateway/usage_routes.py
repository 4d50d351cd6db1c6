"""GET /v1/usage: a tenant's own usage. The admin route gives the same over all tenants."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from aiohttp import web

from gateway.errors import bad_request
from gateway.parts import PARTS, Parts
from gateway.tenancy_json import FieldError
from gateway.usage_store import UsageStore
from gateway.usage_view import Selection, as_csv, as_json, records
from protocol.ids import TenantId

DEADLINE_S = 15.0
_PARAMETERS = {"by", "from", "to", "limit", "format"}


async def usage(request: web.Request) -> web.Response:
    """Usage of the caller's tenant; a key of the scope `usage` is enough."""
    parts = request.app[PARTS]
    caller = await parts.auth.tenant(request, "inference", "usage")
    return await usage_response(parts, request, [caller.tenant], _PARAMETERS)


async def usage_response(
    parts: Parts, request: web.Request, tenants: list[TenantId], parameters: set[str]
) -> web.Response:
    """Usage of tenants as the query wants it: by hour, day or request, as JSON or CSV. Raises ApiError."""
    query = query_of(request, parameters)
    form = query.pop("format", "json")
    if form not in ("json", "csv"):
        raise bad_request("Invalid 'format': must be json or csv.", "format")
    store = UsageStore(parts.link.commands, parts.link.keys)
    try:
        wanted = Selection.parse(query, parts.watch.now_ms())
        found = await parts.link.call(_within_deadline(records(store, tenants, wanted)))
    except FieldError as error:
        raise bad_request(f"Invalid {error}.", error.path) from None
    # Not in this thread: ten thousand rows would hold up all streams for a quarter of a second.
    if form == "csv":
        text = await asyncio.to_thread(as_csv, wanted.columns, found)
        return web.Response(text=text, content_type="text/csv", charset="utf-8")
    return web.Response(text=await asyncio.to_thread(as_json, wanted, found), content_type="application/json")


async def _within_deadline(reading: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    async with asyncio.timeout(DEADLINE_S):
        return await reading


def query_of(request: web.Request, parameters: set[str]) -> dict[str, str]:
    """The query's parameters, each known and there once. Raises ApiError."""
    for name in request.query:
        if name not in parameters or len(request.query.getall(name)) > 1:
            raise bad_request("Unknown or repeated query parameter.", name[:64])
    return dict(request.query)
