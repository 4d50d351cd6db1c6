"""Tenants, API keys and usage totals in Redis. The `sluicegate` command uses it too."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from protocol.codec import decode, encode
from protocol.errors import DecodeError
from protocol.ids import TenantId
from protocol.key_space import KeySpace
from protocol.tenancy import ApiKey, Role, Tenant, key_digest, new_api_key

USAGE_FIELDS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class TenantStoreError(Exception):
    """A change that can't be made; the message is one clear line."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only time that it's seen."""

    secret: str
    record: ApiKey


class TenantStore:
    """Reads and writes through one Redis client; errors of the client pass through."""

    def __init__(self, client: Any, keys: KeySpace, pepper: bytes) -> None:
        self._client = client
        self._keys = keys
        self._pepper = pepper

    async def create_tenant(self, tenant: TenantId, display_name: str) -> Tenant:
        """Add a tenant; raises TenantStoreError if there is one of this id."""
        record = Tenant(tenant, display_name, _now_ms())
        if not await self._client.hsetnx(self._keys.tenants, tenant, encode(record)):
            raise TenantStoreError(f"tenant {tenant!r} exists already")
        return record

    async def tenants(self) -> list[Tenant]:
        """All tenants, by id."""
        found = await self._client.hvals(self._keys.tenants)
        return sorted((decode(Tenant, raw) for raw in found), key=lambda tenant: tenant.id)

    async def tenant(self, tenant: TenantId) -> Tenant | None:
        """One tenant."""
        raw = await self._client.hget(self._keys.tenants, tenant)
        return None if raw is None else decode(Tenant, raw)

    async def delete_tenant(self, tenant: TenantId) -> int:
        """Remove a tenant with its keys and usage; returns how many keys. Raises TenantStoreError if there is none."""
        if not await self._client.hdel(self._keys.tenants, tenant):
            raise TenantStoreError(f"there is no tenant {tenant!r}")
        digests = [digest for digest, key in await self._records() if key.tenant == tenant]
        if digests:
            await self._client.hdel(self._keys.api_keys, *digests)
        await self._client.delete(self._keys.usage(tenant))
        return len(digests)

    async def create_key(self, tenant: TenantId, name: str, role: Role = "inference") -> NewKey:
        """A new key for a tenant; raises TenantStoreError if there's no such tenant."""
        if await self.tenant(tenant) is None:
            raise TenantStoreError(f"there is no tenant {tenant!r}")
        secret = new_api_key()
        return NewKey(secret, await self._store(secret, tenant, name, role))

    async def adopt_key(self, secret: str, tenant: TenantId, name: str) -> ApiKey:
        """Store a key that was made before, so that a stack's demo key stays the same."""
        found = await self.find_key(secret)
        return found or await self._store(secret, tenant, name, "inference")

    async def keys(self, tenant: TenantId | None = None) -> list[ApiKey]:
        """All keys, or those of one tenant."""
        records = [key for _, key in await self._records() if tenant in (None, key.tenant)]
        return sorted(records, key=lambda key: (key.tenant, key.created_ms, key.id))

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Remove a key by its public id; raises TenantStoreError if there is none."""
        for digest, key in await self._records():
            if key.id == key_id:
                await self._client.hdel(self._keys.api_keys, digest)
                return key
        raise TenantStoreError(f"there is no key {key_id!r}")

    async def find_key(self, secret: str) -> ApiKey | None:
        """The record of a key that a client sent."""
        digest = key_digest(self._pepper, secret)
        return None if digest is None else await self.find_digest(digest)

    async def find_digest(self, digest: str) -> ApiKey | None:
        """The record under a digest."""
        raw = await self._client.hget(self._keys.api_keys, digest)
        try:
            return None if raw is None else decode(ApiKey, raw)
        except DecodeError:
            return None  # an unreadable record opens no door

    async def add_usage(self, tenant: TenantId, amounts: dict[str, int]) -> None:
        """Add to a tenant's totals, all at once."""
        pipeline = self._client.pipeline(transaction=True)
        for field, amount in amounts.items():
            pipeline.hincrby(self._keys.usage(tenant), field, amount)
        await pipeline.execute()

    async def usage(self, tenant: TenantId) -> dict[str, int]:
        """A tenant's totals."""
        raw = await self._client.hgetall(self._keys.usage(tenant))
        return {field: int(raw.get(field.encode(), 0)) for field in USAGE_FIELDS}

    async def _store(self, secret: str, tenant: TenantId, name: str, role: Role) -> ApiKey:
        digest = key_digest(self._pepper, secret)
        assert digest is not None
        record = ApiKey("key_" + secrets.token_hex(6), tenant, name, _now_ms(), role)
        await self._client.hset(self._keys.api_keys, digest, encode(record))
        return record

    async def _records(self) -> list[tuple[str, ApiKey]]:
        found = await self._client.hgetall(self._keys.api_keys)
        return [(digest.decode(), decode(ApiKey, raw)) for digest, raw in found.items()]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
