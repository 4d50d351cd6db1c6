"""`sluicegate tenant` and `sluicegate key`: straight to Redis, with the installation's secrets."""

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisError

from gateway.tenant_store import TenantStore, TenantStoreError
from protocol.errors import ProtocolError
from protocol.ids import TenantId, parse_tenant_id
from protocol.key_space import KeySpace
from protocol.redis_url import cluster_node_url
from sluicegate.environment import data_folder, redis_url
from sluicegate.errors import CommandError
from sluicegate.secrets import derived_keys

TIMEOUT_S = 5.0


def _with_store(arguments: Namespace, work: Callable[[TenantStore], Awaitable[None]]) -> None:
    data = data_folder(arguments.data)
    url = redis_url(arguments.redis_url, data)
    pepper = derived_keys(data).key_pepper

    async def connected() -> None:
        node_url = cluster_node_url(url)
        kind: Any = Redis if node_url is None else RedisCluster
        client = kind.from_url(node_url or url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        try:
            await work(TenantStore(client, KeySpace(), pepper))
        finally:
            await client.aclose()

    try:
        asyncio.run(connected())
    except (TenantStoreError, ProtocolError) as error:
        raise CommandError(str(error)) from None
    except (RedisError, OSError, TimeoutError) as error:
        raise CommandError(f"cannot reach Redis: {type(error).__name__}: {error}; is the stack up?") from None


def _tenant_id(text: str) -> TenantId:
    try:
        return parse_tenant_id(text)
    except ProtocolError as error:
        raise CommandError(str(error)) from None


def _day(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M")


def create_tenant(arguments: Namespace) -> None:
    """Add a tenant."""
    tenant = _tenant_id(arguments.tenant)

    async def work(store: TenantStore) -> None:
        await store.create_tenant(tenant, arguments.display_name or tenant)
        print(f"Created tenant {tenant}. Give it a key with: sluicegate key create {tenant}")

    _with_store(arguments, work)


def list_tenants(arguments: Namespace) -> None:
    """All tenants with their keys and totals."""

    async def work(store: TenantStore) -> None:
        keys = await store.keys()
        print(
            f"{'TENANT':<24} {'CREATED (UTC)':<17} {'KEYS':>4} {'REQUESTS':>9} {'PROMPT':>12} {'CACHED':>12} {'OUTPUT':>12}"
        )
        for tenant in await store.tenants():
            usage = await store.usage(tenant.id)
            count = sum(key.tenant == tenant.id for key in keys)
            print(
                f"{tenant.id:<24} {_day(tenant.created_ms):<17} {count:>4} {usage['requests']:>9} "
                f"{usage['prompt_tokens']:>12} {usage['cached_tokens']:>12} {usage['completion_tokens']:>12}"
            )

    _with_store(arguments, work)


def delete_tenant(arguments: Namespace) -> None:
    """Remove a tenant and its keys."""
    tenant = _tenant_id(arguments.tenant)

    async def work(store: TenantStore) -> None:
        count = await store.delete_tenant(tenant)
        print(f"Deleted tenant {tenant} and its {count} {'key' if count == 1 else 'keys'}.")

    _with_store(arguments, work)


def create_key(arguments: Namespace) -> None:
    """Make a key and show it, once."""
    tenant = _tenant_id(arguments.tenant)

    async def work(store: TenantStore) -> None:
        made = await store.create_key(tenant, arguments.name, "admin" if arguments.admin else "inference")
        print(made.secret)

    _with_store(arguments, work)


def list_keys(arguments: Namespace) -> None:
    """Keys by their public ids."""
    tenant = None if arguments.tenant is None else _tenant_id(arguments.tenant)

    async def work(store: TenantStore) -> None:
        print(f"{'KEY ID':<18} {'TENANT':<24} {'NAME':<20} {'ROLE':<10} CREATED (UTC)")
        for key in await store.keys(tenant):
            print(f"{key.id:<18} {key.tenant:<24} {key.name:<20} {key.role:<10} {_day(key.created_ms)}")

    _with_store(arguments, work)


def revoke_key(arguments: Namespace) -> None:
    """Remove a key; gateways refuse it within a second."""

    async def work(store: TenantStore) -> None:
        key = await store.revoke_key(arguments.key_id)
        print(f"Revoked key {key.id} of tenant {key.tenant}.")

    _with_store(arguments, work)
