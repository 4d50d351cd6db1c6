"""All paths of the admin API."""

from aiohttp import web

from gateway.admin import keys, prices, reports, shares, tenants
from gateway.admin.door import admin


def admin_routes() -> list[web.RouteDef]:
    """The routes under /admin/v1, beside that of the workers."""
    return [
        web.get("/admin/v1/tenants", admin(tenants.list_tenants)),
        web.post("/admin/v1/tenants", admin(tenants.create_tenant)),
        web.get("/admin/v1/tenants/{tenant}", admin(tenants.get_tenant)),
        web.patch("/admin/v1/tenants/{tenant}", admin(tenants.change_tenant)),
        web.delete("/admin/v1/tenants/{tenant}", admin(tenants.delete_tenant)),
        web.get("/admin/v1/tenants/{tenant}/limits", admin(tenants.get_limits)),
        web.put("/admin/v1/tenants/{tenant}/limits", admin(tenants.put_limits)),
        web.get("/admin/v1/tenants/{tenant}/keys", admin(keys.list_keys)),
        web.post("/admin/v1/tenants/{tenant}/keys", admin(keys.create_key)),
        web.get("/admin/v1/keys", admin(keys.list_keys)),
        web.get("/admin/v1/keys/{key}", admin(keys.get_key)),
        web.patch("/admin/v1/keys/{key}", admin(keys.change_key)),
        web.post("/admin/v1/keys/{key}/rotate", admin(keys.rotate_key)),
        web.delete("/admin/v1/keys/{key}", admin(keys.revoke_key)),
        web.get("/admin/v1/prices", admin(prices.list_prices)),
        web.put("/admin/v1/prices/{model:.+}", admin(prices.put_price)),
        web.delete("/admin/v1/prices/{model:.+}", admin(prices.delete_price)),
        web.get("/admin/v1/shares", admin(shares.list_shares)),
        web.post("/admin/v1/shares", admin(shares.create_share)),
        web.delete("/admin/v1/shares/{share}", admin(shares.delete_share)),
        web.get("/admin/v1/usage", admin(reports.all_usage)),
        web.get("/admin/v1/queue", admin(reports.queue)),
        web.get("/admin/v1/audit", admin(reports.audit)),
    ]
