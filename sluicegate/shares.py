"""`sluicegate share`."""

from argparse import Namespace

from protocol.tenancy import parse_share_name
from sluicegate.allowances import shown_time
from sluicegate.redis_access import Stores, tenant_id, with_stores


def create_share(arguments: Namespace) -> None:
    """Let tenants share prefixes under a name."""
    members = tuple(tenant_id(part) for part in arguments.tenants.split(",") if part)

    async def work(stores: Stores) -> None:
        group = await stores.shares.create(parse_share_name(arguments.name), members)
        print(f"Created share group {group.name} of {', '.join(group.tenants)}.")

    with_stores(arguments, work)


def list_shares(arguments: Namespace) -> None:
    """All share groups."""

    async def work(stores: Stores) -> None:
        print(f"{'SHARE GROUP':<24} {'CREATED (UTC)':<17} TENANTS")
        for group in await stores.shares.groups():
            print(f"{group.name:<24} {shown_time(group.created_ms):<17} {', '.join(group.tenants)}")

    with_stores(arguments, work)


def delete_share(arguments: Namespace) -> None:
    """Remove a share group."""

    async def work(stores: Stores) -> None:
        await stores.shares.delete(parse_share_name(arguments.name))
        print(f"Deleted share group {arguments.name}.")

    with_stores(arguments, work)
