"""The operator's API under /admin/v1: tenants, keys, limits, prices, share groups, usage, queue and audit.

Reading order: `routes` (all paths), `door` (who may, errors, bodies), then `tenants`, `keys`, `prices`, `shares`, `reports`; `description` (the same for /openapi.json).
"""
