"""Share groups."""

from aiohttp import web

from gateway.admin.door import Desk, listed
from gateway.tenancy_json import FieldError, known, share_json
from protocol.ids import parse_tenant_id
from protocol.tenancy import parse_share_name


async def list_shares(desk: Desk) -> web.Response:
    """All groups."""
    return listed([share_json(group) for group in await desk.shares.groups()])


async def create_share(desk: Desk) -> web.Response:
    """Make a group out of `name` and `tenants`."""
    body = known(await desk.body(), "", {"name", "tenants"})
    name, tenants = body.get("name"), body.get("tenants")
    if type(name) is not str:
        raise FieldError("name", "expected a name")
    if not isinstance(tenants, list) or any(type(tenant) is not str for tenant in tenants):
        raise FieldError("tenants", "expected an array of tenant ids")
    members = tuple(parse_tenant_id(tenant) for tenant in tenants)
    return web.json_response(share_json(await desk.shares.create(parse_share_name(name), members)), status=201)


async def delete_share(desk: Desk) -> web.Response:
    """Remove a group."""
    name = parse_share_name(desk.request.match_info["share"])
    await desk.shares.delete(name)
    return web.json_response({"object": "share.deleted", "name": name, "deleted": True})
