"""Tenants and their API keys in Redis. The `sluicegate` command uses it too."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gateway.records import Records
from protocol.audit import AuditKind, AuditRecord
from protocol.ids import ModelName, TenantId
from protocol.key_space import FORGET_FIELD, KeySpace
from protocol.tenancy import ApiKey, Scope, ShareGroup, Tenant, key_digest, new_api_key
from protocol.usage import TOTALS

DELETE_BATCH = 500
DELETED_S = 3600  # longer than a request that was let in before can take to be admitted
MAX_TRIES = 20


# Of the stream that tells workers; what is older has been read, or its worker has ended.
MAX_CANCELS = 10_000
CANCELS_TTL_MS = 600_000


class TenantStoreError(Exception):
    """A change that can't be made; the message is one clear line."""


class MissingError(TenantStoreError):
    """There is nothing of this name."""


class ExistsError(TenantStoreError):
    """There is something of this name already."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only time that it's seen."""

    secret: str
    record: ApiKey


class TenantStore:
    """Reads and writes through one Redis client; errors of the client pass through. `actor` is named in the audit."""

    def __init__(self, client: Any, keys: KeySpace, pepper: bytes, actor: str = "cli") -> None:
        self._client = client
        self._keys = keys
        self._pepper = pepper
        self._actor = actor
        self._records = Records(client, keys, pepper)

    # -- tenants -----------------------------------------------------------------------------------------------------

    async def create_tenant(self, tenant: TenantId, display_name: str, **fields: Any) -> Tenant:
        """Add a tenant; raises ExistsError if there is one of this id, ValueError for a field that can't be."""
        record = Tenant(tenant, display_name, await self._records.now_ms(), **fields)
        if await self.tenant(tenant) is None:
            await self._client.delete(self._keys.deleted(tenant))
        if not await self._records.add(self._keys.tenants, tenant, record, self._audit("tenant.created", tenant)):
            raise ExistsError(f"tenant {tenant!r} exists already")
        return record

    async def tenants(self) -> list[Tenant]:
        """All tenants, by id."""
        found = await self._records.all(self._keys.tenants, Tenant)
        return sorted(found.values(), key=lambda tenant: tenant.id)

    async def tenant(self, tenant: TenantId) -> Tenant | None:
        """One tenant."""
        return await self._records.get(self._keys.tenants, tenant, Tenant)

    async def change_tenant(self, tenant: TenantId, **changes: Any) -> Tenant:
        """Replace fields of a tenant; raises MissingError, or ValueError for a field that can't be."""
        kind: AuditKind = "tenant.changed"
        if set(changes) == {"status"}:
            kind = "tenant.disabled" if changes["status"] == "disabled" else "tenant.enabled"
        audit = self._audit(kind, tenant, detail=", ".join(sorted(changes)))
        changed: Tenant = await self._replace(
            self._keys.tenants, tenant, Tenant, lambda old: replace(old, **changes), audit, f"tenant {tenant!r}"
        )
        return changed

    async def delete_tenant(self, tenant: TenantId) -> int:
        """Remove a tenant with its keys, accounts and memberships; returns how many keys. Raises MissingError if there is none."""
        if await self.tenant(tenant) is None:
            raise MissingError(f"there is no tenant {tenant!r}")
        # Keys go first: none may be left for a later tenant of the same id.
        owned = [(digest, key) for digest, key in (await self._key_records()).items() if key.tenant == tenant]
        for digest, key in owned:
            await self._remove_key(digest, key)
        await self._leave_shares(tenant)
        await self._records.remove(self._keys.tenants, tenant, self._audit("tenant.deleted", tenant))
        await self._client.set(self._keys.deleted(tenant), 1, ex=DELETED_S)
        await self._delete_accounts(tenant)
        await self._tell_workers(tenant)
        return len(owned)

    async def _tell_workers(self, tenant: TenantId) -> None:
        """Workers end what still runs, and zero the tenant's pages of the KV cache."""
        for raw in await self._client.zrange(self._keys.models, 0, -1):
            stream = self._keys.cancels(ModelName(raw.decode()))
            await self._client.xadd(stream, {FORGET_FIELD: tenant}, maxlen=MAX_CANCELS, approximate=True)
            await self._client.pexpire(stream, CANCELS_TTL_MS)

    # -- keys --------------------------------------------------------------------------------------------------------

    async def create_key(self, tenant: TenantId, name: str, *scopes: Scope, **fields: Any) -> NewKey:
        """A new key for a tenant; raises MissingError if there's no such tenant, ValueError for a field that can't be."""
        if await self.tenant(tenant) is None:
            raise MissingError(f"there is no tenant {tenant!r}")
        secret = new_api_key()
        return NewKey(secret, await self._store(secret, tenant, name, scopes or ("inference",), fields))

    async def adopt_key(self, secret: str, tenant: TenantId, name: str, *scopes: Scope, **fields: Any) -> ApiKey:
        """Store a key that was made before, so that a stack's key stays the same. Raises TenantStoreError if it was revoked."""
        found = await self.find_key(secret)
        if found is not None:
            return found
        if await self.is_revoked(secret):
            raise TenantStoreError("the key was revoked")
        return await self._store(secret, tenant, name, scopes or ("inference",), fields)

    async def is_revoked(self, secret: str) -> bool:
        """Whether a key was revoked."""
        digest = key_digest(self._pepper, secret)
        return digest is not None and bool(await self._client.sismember(self._keys.revoked_keys, digest))

    async def keys(self, tenant: TenantId | None = None) -> list[ApiKey]:
        """All keys, or those of one tenant."""
        records = [key for key in (await self._key_records()).values() if tenant in (None, key.tenant)]
        return sorted(records, key=lambda key: (key.tenant, key.created_ms, key.id))

    async def last_used(self) -> dict[str, int]:
        """Key id -> about when it was last used, in Unix milliseconds."""
        return {key.decode(): int(ms) for key, ms in (await self._client.hgetall(self._keys.last_used)).items()}

    async def change_key(self, key_id: str, **changes: Any) -> ApiKey:
        """Replace fields of a key; raises MissingError, or ValueError for a field that can't be."""
        digest, key = await self._find_id(key_id)
        audit = self._audit("key.changed", key.tenant, key.id, detail=", ".join(sorted(changes)))
        return await self._replace_key(digest, key, changes, audit)

    async def rotate_key(self, key_id: str, overlap_ms: int) -> NewKey:
        """A successor with the same rights; the old key works for `overlap_ms` more, or as long as it would have. Raises MissingError."""
        digest, key = await self._find_id(key_id)
        now_ms = await self._records.now_ms()
        fields = {"limits": key.limits, "budgets": key.budgets}
        secret = new_api_key()
        made = await self._store(secret, key.tenant, key.name, key.scopes, fields)
        end_ms = min(now_ms + overlap_ms, key.expires_ms or now_ms + overlap_ms)
        audit = self._audit("key.rotated", key.tenant, key.id, detail=f"successor {made.id}")
        await self._replace_key(digest, key, {"expires_ms": end_ms}, audit)
        return NewKey(secret, made)

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Remove a key by its public id, for good; raises MissingError if there is none."""
        digest, key = await self._find_id(key_id)
        await self._remove_key(digest, key)
        return key

    async def find_key(self, secret: str) -> ApiKey | None:
        """The record of a key that a client sent."""
        digest = key_digest(self._pepper, secret)
        return None if digest is None else await self.find_digest(digest)

    async def find_digest(self, digest: str) -> ApiKey | None:
        """The record under a digest."""
        return await self._records.get(self._keys.api_keys, digest, ApiKey)

    # -- totals ------------------------------------------------------------------------------------------------------

    async def usage(self, tenant: TenantId) -> dict[str, int]:
        """A tenant's totals."""
        raw = await self._client.hgetall(self._keys.usage(tenant))
        return {field: int(raw.get(field.encode(), 0)) for field in TOTALS}

    # -- within ------------------------------------------------------------------------------------------------------

    def _audit(self, kind: AuditKind, tenant: TenantId, key: str = "", detail: str = "") -> AuditRecord:
        return AuditRecord(kind, self._actor, tenant, key, detail=detail)

    async def _replace(
        self, place: str, field: str, kind: type, change: Callable[[Any], Any], audit: AuditRecord, name: str
    ) -> Any:
        """Change a record as it is now, again if somebody else was faster."""
        for _ in range(MAX_TRIES):
            found = await self._records.find(place, field, kind)
            if found is None:
                raise MissingError(f"there is no {name}")
            changed = change(found.record)
            if changed == found.record or await self._records.replace(place, field, found.raw, changed, audit):
                return changed
        raise TenantStoreError(f"{name} is being changed by others all the time")

    async def _replace_key(self, digest: str, key: ApiKey, changes: dict[str, Any], audit: AuditRecord) -> ApiKey:
        changed: ApiKey = await self._replace(
            self._keys.api_keys, digest, ApiKey, lambda old: replace(old, **changes), audit, f"key {key.id!r}"
        )
        return changed

    async def _store(
        self, secret: str, tenant: TenantId, name: str, scopes: tuple[Scope, ...], fields: dict[str, Any]
    ) -> ApiKey:
        digest = key_digest(self._pepper, secret)
        assert digest is not None
        record = ApiKey(
            "key_" + secrets.token_hex(6), tenant, name, await self._records.now_ms(), tuple(scopes), **fields
        )
        audit = self._audit("key.created", tenant, record.id, detail=",".join(scopes))
        if not await self._records.add(self._keys.api_keys, digest, record, audit):
            raise ExistsError("this key exists already")
        return record

    async def _remove_key(self, digest: str, key: ApiKey) -> None:
        await self._records.remove(
            self._keys.api_keys, digest, self._audit("key.revoked", key.tenant, key.id), retire=digest
        )
        await self._client.hdel(self._keys.last_used, key.id)

    async def _key_records(self) -> dict[str, ApiKey]:
        return await self._records.all(self._keys.api_keys, ApiKey)

    async def _find_id(self, key_id: str) -> tuple[str, ApiKey]:
        for digest, key in (await self._key_records()).items():
            if key.id == key_id:
                return digest, key
        raise MissingError(f"there is no key {key_id!r}")

    async def _leave_shares(self, tenant: TenantId) -> None:
        for name, group in (await self._records.all(self._keys.shares, ShareGroup)).items():
            if tenant in group.tenants:
                audit = AuditRecord("share.changed", self._actor, tenant, detail=f"{name}: its tenant was deleted")
                await self._replace(
                    self._keys.shares, name, ShareGroup,
                    lambda old: replace(old, tenants=tuple(t for t in old.tenants if t != tenant)), audit, f"share group {name!r}",
                )  # fmt: skip

    async def _delete_accounts(self, tenant: TenantId) -> None:
        batch: list[bytes] = []
        async for name in self._client.scan_iter(self._keys.account(tenant, "*"), count=1000):
            if name.decode() != self._keys.deleted(tenant):
                batch.append(name)
            if len(batch) >= DELETE_BATCH:
                await self._client.delete(*batch)
                batch.clear()
        if batch:
            await self._client.delete(*batch)
