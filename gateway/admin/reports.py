"""What an operator looks at: usage over all tenants, the queue, the audit."""

from dataclasses import asdict
from typing import Any

from aiohttp import web

from gateway.admin.door import Desk, listed
from gateway.audit_log import AuditEntry, AuditLog
from gateway.tenancy_json import moment_text
from gateway.usage_routes import query_of, usage_response
from gateway.usage_view import Selection
from protocol.ids import parse_tenant_id


async def all_usage(desk: Desk) -> web.Response:
    """Usage of all tenants, or of the one that's named."""
    named = desk.request.query.get("tenant")
    tenants = [tenant.id for tenant in await desk.tenants.tenants()] if named is None else [parse_tenant_id(named)]
    return await usage_response(desk.parts, desk.request, tenants, {"by", "from", "to", "limit", "format", "tenant"})


async def audit(desk: Desk) -> web.Response:
    """The audit's latest entries in order of time: `from`, `to`, `limit`, `kind` (`key` for all of them), `tenant`."""
    query = query_of(desk.request, {"from", "to", "limit", "kind", "tenant"})
    kind, tenant = query.pop("kind", ""), query.pop("tenant", "")
    wanted = Selection.parse({"from": "0", **query}, desk.parts.watch.now_ms())
    log = AuditLog(desk.parts.link.commands, desk.parts.link.keys)
    return listed(
        [audit_json(entry) for entry in await log.entries(wanted.from_ms, wanted.to_ms, wanted.most, kind, tenant)]
    )


async def queue(desk: Desk) -> web.Response:
    """What waits and runs: by model in its queue, by tenant as admitted requests."""
    client, keys = desk.parts.link.commands, desk.parts.link.keys
    await desk.parts.directory.refresh()
    rows = []
    for model, workers in sorted(desk.parts.directory.fleet.live.items()):
        queue_keys = keys.queue(model)
        waiting, running = int(await client.hget(queue_keys.load, "n") or 0), await client.zcard(queue_keys.leases)
        dead = await client.xlen(keys.dead(model))
        rows.append({"model": model, "workers": len(workers), "waiting": waiting, "running": running, "dead": dead})
    tenants = []
    for raw in await client.zrange(keys.metered, 0, -1):
        tenant = parse_tenant_id(raw.decode("utf-8", "replace"))
        tenants.append({"tenant": tenant, "open_requests": await client.hlen(keys.open_requests(tenant))})
    return listed(rows, tenants=tenants)


def audit_json(entry: AuditEntry) -> dict[str, Any]:
    """An audit entry as it is shown; fields that say nothing are left out."""
    told = {name: value for name, value in asdict(entry.record).items() if value not in ("", None)}
    return {"id": entry.id, "at": moment_text(entry.at_ms), **told}
