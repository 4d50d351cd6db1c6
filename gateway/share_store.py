"""Share groups in Redis: tenants that an operator lets share prefixes under a name."""

from typing import Any

from gateway.records import Records
from gateway.tenant_store import ExistsError, MissingError, TenantStoreError
from protocol.audit import AuditRecord
from protocol.ids import TenantId
from protocol.key_space import KeySpace
from protocol.tenancy import ShareGroup, Tenant


class ShareStore:
    """Reads and writes through one Redis client; errors of the client pass through."""

    def __init__(self, client: Any, keys: KeySpace, pepper: bytes, actor: str = "cli") -> None:
        self._keys = keys
        self._actor = actor
        self._records = Records(client, keys, pepper)

    async def create(self, name: str, tenants: tuple[TenantId, ...]) -> ShareGroup:
        """Make a group of at least two tenants; raises TenantStoreError: it exists, or a tenant doesn't."""
        members = tuple(dict.fromkeys(tenants))
        if len(members) < 2:
            raise TenantStoreError("a share group needs at least two tenants")
        for tenant in members:
            if await self._records.get(self._keys.tenants, tenant, Tenant) is None:
                raise MissingError(f"there is no tenant {tenant!r}")
        group = ShareGroup(name, members, await self._records.now_ms())
        audit = AuditRecord("share.created", self._actor, detail=f"{name}: {', '.join(members)}")
        if not await self._records.add(self._keys.shares, name, group, audit):
            raise ExistsError(f"share group {name!r} exists already")
        return group

    async def groups(self) -> list[ShareGroup]:
        """All groups, by name."""
        found = await self._records.all(self._keys.shares, ShareGroup)
        return sorted(found.values(), key=lambda group: group.name)

    async def delete(self, name: str) -> None:
        """Remove a group; raises MissingError if there is none. What its members shared can't be reached any more."""
        if not await self._records.remove(
            self._keys.shares, name, AuditRecord("share.deleted", self._actor, detail=name)
        ):
            raise MissingError(f"there is no share group {name!r}")

    async def may_use(self, tenant: TenantId, name: str) -> bool:
        """Whether a tenant is a member of a group."""
        group = await self._records.get(self._keys.shares, name, ShareGroup)
        return group is not None and tenant in group.tenants
