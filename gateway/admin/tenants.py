"""Tenants and the state of their limits."""

from typing import Any

from aiohttp import web

from gateway.admin.door import Desk, listed
from gateway.limits.state import standing_json, standings
from gateway.tenancy_json import FieldError, limits_of, tenant_changes, tenant_json
from gateway.tenant_store import MissingError
from protocol.ids import TenantId, parse_tenant_id
from protocol.tenancy import Tenant


async def list_tenants(desk: Desk) -> web.Response:
    """All tenants."""
    return listed([tenant_json(tenant) for tenant in await desk.tenants.tenants()])


async def create_tenant(desk: Desk) -> web.Response:
    """Add a tenant: `id`, and any of the fields that PATCH takes."""
    body = await desk.body()
    name = body.pop("id", None)
    if type(name) is not str:
        raise FieldError("id", "expected a tenant id")
    changes = _checked(tenant_changes(body, None))
    tenant = parse_tenant_id(name)
    made = await desk.tenants.create_tenant(tenant, changes.pop("display_name", tenant), **changes)
    return web.json_response(tenant_json(made), status=201)


async def get_tenant(desk: Desk) -> web.Response:
    """One tenant."""
    return web.json_response(tenant_json(await _tenant(desk, desk.tenant_id())))


async def change_tenant(desk: Desk) -> web.Response:
    """Change the given fields; `limits` are merged, a null takes one away."""
    old = await _tenant(desk, desk.tenant_id())
    changes = _checked(tenant_changes(await desk.body(), old))
    return web.json_response(tenant_json(await desk.tenants.change_tenant(old.id, **changes)))


async def delete_tenant(desk: Desk) -> web.Response:
    """Remove a tenant, its keys and its accounts. Its running requests are ended."""
    tenant = desk.tenant_id()
    count = await desk.tenants.delete_tenant(tenant)
    return web.json_response({"object": "tenant.deleted", "id": tenant, "deleted": True, "keys": count})


async def get_limits(desk: Desk) -> web.Response:
    """A tenant's limits and those of its keys, with what is used of each now."""
    tenant = await _tenant(desk, desk.tenant_id())
    owners = [None, *await desk.tenants.keys(tenant.id)]
    link = desk.parts.link
    rows: list[dict[str, Any]] = []
    for key in owners:
        rows += [standing_json(one, key) for one in await standings(link.commands, link.keys, tenant, key)]
    return listed(rows, tenant=tenant.id)


async def put_limits(desk: Desk) -> web.Response:
    """Replace a tenant's limits as a whole."""
    tenant = await _tenant(desk, desk.tenant_id())
    limits = limits_of(await desk.body(), type(tenant.limits)(), "limits")
    return web.json_response(tenant_json(await desk.tenants.change_tenant(tenant.id, limits=limits)))


async def _tenant(desk: Desk, tenant: TenantId) -> Tenant:
    found = await desk.tenants.tenant(tenant)
    if found is None:
        raise MissingError(f"there is no tenant {tenant!r}")
    return found


def _checked(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, if a tenant can have them; raises FieldError."""
    try:
        Tenant(**{"id": TenantId("x"), "display_name": "x", "created_ms": 0, **changes})
    except ValueError as error:
        raise FieldError("", str(error)) from None
    return changes
