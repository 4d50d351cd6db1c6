"""`sluicegate tenant`."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from gateway.limits.state import standing_json, standings
from gateway.tenancy_json import key_json, tenant_json
from protocol.errors import ProtocolError
from protocol.ids import parse_model_name
from protocol.limits import UNLIMITED
from sluicegate.allowances import allowances_from, pairs_from, shown_time
from sluicegate.environment import data_folder
from sluicegate.errors import CommandError
from sluicegate.redis_access import Stores, tenant_id, with_stores
from sluicegate.tenant_seed import apply_seed, read_seed


def _tenant_fields(arguments: Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if arguments.weight is not None:
        changes["weight"] = arguments.weight
    if arguments.model:
        try:
            changes["models"] = None if arguments.model == ["all"] else tuple(map(parse_model_name, arguments.model))
        except ProtocolError as error:
            raise CommandError(str(error)) from None
    if arguments.metadata:
        changes["metadata"] = pairs_from("--metadata", arguments.metadata)
    return changes


def create_tenant(arguments: Namespace) -> None:
    """Add a tenant."""
    tenant = tenant_id(arguments.tenant)
    fields = _tenant_fields(arguments) | allowances_from(arguments, UNLIMITED)

    async def work(stores: Stores) -> None:
        await stores.tenants.create_tenant(tenant, arguments.display_name or tenant, **fields)
        print(f"Created tenant {tenant}. Give it a key with: sluicegate key create {tenant}")

    with_stores(arguments, work)


def update_tenant(arguments: Namespace) -> None:
    """Change what is given."""
    tenant = tenant_id(arguments.tenant)

    async def work(stores: Stores) -> None:
        old = await stores.tenants.tenant(tenant)
        changes = _tenant_fields(arguments) | allowances_from(arguments, old.limits if old else UNLIMITED)
        if arguments.display_name:
            changes["display_name"] = arguments.display_name
        await stores.tenants.change_tenant(tenant, **changes)
        print(f"Changed tenant {tenant}." if changes else "Nothing to change.")

    with_stores(arguments, work)


def set_status(arguments: Namespace) -> None:
    """Disable a tenant, its running requests included, or let it in again."""
    tenant = tenant_id(arguments.tenant)

    async def work(stores: Stores) -> None:
        await stores.tenants.change_tenant(tenant, status=arguments.status)
        print(f"Tenant {tenant} is {arguments.status}.")

    with_stores(arguments, work)


def list_tenants(arguments: Namespace) -> None:
    """All tenants with their keys and totals."""

    async def work(stores: Stores) -> None:
        keys = await stores.tenants.keys()
        print(
            f"{'TENANT':<24} {'CREATED (UTC)':<17} {'STATUS':<8} {'KEYS':>4} {'REQUESTS':>9} {'PROMPT':>12} {'CACHED':>12} {'OUTPUT':>12}"
        )
        for tenant in await stores.tenants.tenants():
            usage = await stores.tenants.usage(tenant.id)
            count = sum(key.tenant == tenant.id for key in keys)
            print(
                f"{tenant.id:<24} {shown_time(tenant.created_ms):<17} {tenant.status:<8} {count:>4} {usage['requests']:>9} "
                f"{usage['prompt_tokens']:>12} {usage['cached_tokens']:>12} {usage['completion_tokens']:>12}"
            )

    with_stores(arguments, work)


def show_tenant(arguments: Namespace) -> None:
    """A tenant, its keys, and what is used of each limit, as JSON."""
    tenant = tenant_id(arguments.tenant)

    async def work(stores: Stores) -> None:
        record = await stores.tenants.tenant(tenant)
        if record is None:
            raise CommandError(f"there is no tenant {tenant!r}")
        keys, used = await stores.tenants.keys(tenant), await stores.tenants.last_used()
        state = []
        for key in (None, *keys):
            state += [standing_json(one, key) for one in await standings(stores.client, stores.keys, record, key)]
        shown = {**tenant_json(record), "keys": [key_json(key, used.get(key.id)) for key in keys], "state": state}
        print(json.dumps(shown, indent=2, ensure_ascii=False))

    with_stores(arguments, work)


def delete_tenant(arguments: Namespace) -> None:
    """Remove a tenant and its keys."""
    tenant = tenant_id(arguments.tenant)

    async def work(stores: Stores) -> None:
        count = await stores.tenants.delete_tenant(tenant)
        print(f"Deleted tenant {tenant} and its {count} {'key' if count == 1 else 'keys'}.")

    with_stores(arguments, work)


def apply_tenants(arguments: Namespace) -> None:
    """Make tenants, keys, prices and share groups as a seed file has them."""
    seed = read_seed(Path(arguments.file))

    async def work(stores: Stores) -> None:
        for line in await apply_seed(stores, seed, data_folder(arguments.data)):
            print(line)

    with_stores(arguments, work)
