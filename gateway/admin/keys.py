"""API keys. A secret is in the answer that makes a key, and nowhere else."""

from typing import Any

from aiohttp import web

from gateway.admin.door import Desk, listed
from gateway.tenancy_json import FieldError, key_changes, key_json, number
from gateway.tenant_store import MissingError, NewKey
from protocol.tenancy import ApiKey

MAX_OVERLAP_S = 90 * 86_400


async def list_keys(desk: Desk) -> web.Response:
    """All keys, or those of the tenant in the path."""
    tenant = desk.tenant_id() if "tenant" in desk.request.match_info else None
    if tenant is not None and await desk.tenants.tenant(tenant) is None:
        raise MissingError(f"there is no tenant {tenant!r}")
    used = await desk.tenants.last_used()
    return listed([key_json(key, used.get(key.id)) for key in await desk.tenants.keys(tenant)])


async def create_key(desk: Desk) -> web.Response:
    """A new key for a tenant, with its secret."""
    tenant = desk.tenant_id()
    changes = key_changes(await desk.body() if desk.request.can_read_body else {}, None)
    name, scopes = changes.pop("name", "key"), changes.pop("scopes", ())
    return _new(await desk.tenants.create_key(tenant, name, *scopes, **changes))


async def get_key(desk: Desk) -> web.Response:
    """One key."""
    key = await _key(desk)
    return web.json_response(key_json(key, (await desk.tenants.last_used()).get(key.id)))


async def change_key(desk: Desk) -> web.Response:
    """Change the given fields; `limits` are merged, a null takes one away."""
    key = await _key(desk)
    changed = await desk.tenants.change_key(key.id, **key_changes(await desk.body(), key))
    return web.json_response(key_json(changed, None))


async def rotate_key(desk: Desk) -> web.Response:
    """A successor with the same rights; the old key works for `overlap_s` seconds more (default 3600)."""
    body = await desk.body() if desk.request.can_read_body else {}
    overlap_s = number(body.get("overlap_s", 3600), "overlap_s")
    if set(body) - {"overlap_s"} or not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise FieldError("overlap_s", f"must be 0 to {MAX_OVERLAP_S}, and is the only field")
    return _new(await desk.tenants.rotate_key(desk.request.match_info["key"], int(overlap_s * 1000)))


async def revoke_key(desk: Desk) -> web.Response:
    """Remove a key. Its running requests are ended."""
    key = await desk.tenants.revoke_key(desk.request.match_info["key"])
    return web.json_response({"object": "key.deleted", "id": key.id, "deleted": True})


async def _key(desk: Desk) -> ApiKey:
    wanted = desk.request.match_info["key"]
    for key in await desk.tenants.keys():
        if key.id == wanted:
            return key
    raise MissingError(f"there is no key {wanted[:64]!r}")


def _new(made: NewKey) -> web.Response:
    body: dict[str, Any] = {**key_json(made.record, None), "secret": made.secret}
    return web.json_response(body, status=201, headers={"Cache-Control": "no-store"})
