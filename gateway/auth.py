"""Who sent a request. Only the header is looked at, before a byte of the body is read."""

import hmac
import time
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from gateway.errors import forbidden, unauthorized
from gateway.redis_link import RedisLink
from gateway.tenant_store import TenantStore
from protocol.ids import TenantId
from protocol.tenancy import ApiKey, key_digest

MAX_CACHED_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `weight` is its tenant's share when there's a queue."""

    tenant: TenantId
    key_id: str
    role: Literal["inference", "admin"]
    weight: float = 1.0


class Authenticator:
    """Looks keys up by digest. A result is kept for less than a second, so that a revoked key is refused within one."""

    def __init__(
        self, link: RedisLink, store: TenantStore, pepper: bytes, admin_key: str | None, cache_s: float
    ) -> None:
        self._link = link
        self._store = store
        self._pepper = pepper
        self._admin_key = admin_key.encode() if admin_key else None
        self._cache_s = cache_s
        self._cache: dict[str, tuple[float, ApiKey | None]] = {}

    async def tenant(self, request: web.Request) -> Principal:
        """The tenant behind a request; raises ApiError 401."""
        key = _bearer(request)
        digest = key_digest(self._pepper, key)
        record = None if digest is None else await self._look_up(digest)
        if record is None:
            raise unauthorized()
        return Principal(record.tenant, record.id, record.role)

    async def admin(self, request: web.Request) -> None:
        """Raises ApiError unless the request carries the admin key, or a key of the admin role."""
        key = _bearer(request)
        if self._admin_key is not None and hmac.compare_digest(key.encode("utf-8", "replace"), self._admin_key):
            return
        if (await self.tenant(request)).role != "admin":
            raise forbidden()

    async def _look_up(self, digest: str) -> ApiKey | None:
        now = time.monotonic()
        known = self._cache.get(digest)
        if known is not None and known[0] > now:
            return known[1]
        record = await self._link.call(self._store.find_digest(digest))
        if len(self._cache) >= MAX_CACHED_KEYS:
            self._cache.clear()
        self._cache[digest] = (now + self._cache_s, record)
        return record


def _bearer(request: web.Request) -> str:
    values = request.headers.getall("Authorization", [])
    if len(values) != 1:
        raise unauthorized()
    scheme, _, key = values[0].partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise unauthorized()
    return key.strip()
