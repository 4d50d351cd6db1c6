"""`sluicegate key`."""

import time
from argparse import Namespace

from protocol.limits import UNLIMITED
from sluicegate.allowances import allowances_from, duration_ms, moment_ms, shown_time
from sluicegate.redis_access import Stores, tenant_id, with_stores


def create_key(arguments: Namespace) -> None:
    """Make a key and show it, once."""
    tenant = tenant_id(arguments.tenant)
    scopes = tuple(dict.fromkeys([*(arguments.scope or ()), *(["admin"] if arguments.admin else [])]))
    fields = allowances_from(arguments, UNLIMITED)
    if arguments.expires:
        fields["expires_ms"] = moment_ms("--expires", arguments.expires, _now_ms(), is_past=False)

    async def work(stores: Stores) -> None:
        made = await stores.tenants.create_key(tenant, arguments.name, *scopes, **fields)
        print(made.secret)

    with_stores(arguments, work)


def list_keys(arguments: Namespace) -> None:
    """Keys by their public ids."""
    tenant = None if arguments.tenant is None else tenant_id(arguments.tenant)

    async def work(stores: Stores) -> None:
        print(
            f"{'KEY ID':<18} {'TENANT':<24} {'NAME':<20} {'SCOPES':<16} {'CREATED (UTC)':<17} {'EXPIRES (UTC)':<17} LAST USED (UTC)"
        )
        used = await stores.tenants.last_used()
        for key in await stores.tenants.keys(tenant):
            print(
                f"{key.id:<18} {key.tenant:<24} {key.name:<20} {','.join(key.scopes):<16} {shown_time(key.created_ms):<17} "
                f"{shown_time(key.expires_ms):<17} {shown_time(used.get(key.id))}"
            )

    with_stores(arguments, work)


def update_key(arguments: Namespace) -> None:
    """Change what is given."""

    async def work(stores: Stores) -> None:
        old = next((key for key in await stores.tenants.keys() if key.id == arguments.key_id), None)
        changes = allowances_from(arguments, old.limits if old else UNLIMITED)
        if arguments.expires:
            is_never = arguments.expires == "never"
            changes["expires_ms"] = (
                None if is_never else moment_ms("--expires", arguments.expires, _now_ms(), is_past=False)
            )
        await stores.tenants.change_key(arguments.key_id, **changes)
        print(f"Changed key {arguments.key_id}." if changes else "Nothing to change.")

    with_stores(arguments, work)


def rotate_key(arguments: Namespace) -> None:
    """Make a successor and show it, once; the old key works for a while."""
    overlap_ms = duration_ms("--overlap", arguments.overlap)

    async def work(stores: Stores) -> None:
        print((await stores.tenants.rotate_key(arguments.key_id, overlap_ms)).secret)

    with_stores(arguments, work)


def revoke_key(arguments: Namespace) -> None:
    """Remove a key; gateways refuse it within a second."""

    async def work(stores: Stores) -> None:
        key = await stores.tenants.revoke_key(arguments.key_id)
        print(f"Revoked key {key.id} of tenant {key.tenant}.")

    with_stores(arguments, work)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
