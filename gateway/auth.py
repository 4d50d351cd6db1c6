"""Who sent a request. Only the header is looked at, before a byte of the body is read."""

import asyncio
import hmac
import time
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from gateway.errors import ApiError, forbidden, unauthorized
from gateway.redis_link import RedisLink
from gateway.tenancy_watch import TenancyWatch
from gateway.tenant_store import TenantStore
from protocol.ids import TenantId
from protocol.tenancy import ApiKey, Scope, Tenant, key_digest

MAX_CACHED_KEYS = 10_000
ROOT_ACTOR = "admin"  # who the operator's own key is in the audit


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: whose key it is, and both records as they were at `revision`."""

    tenant: TenantId
    key_id: str
    digest: str = field(repr=False)
    record: Tenant = field(repr=False)
    key: ApiKey = field(repr=False)
    revision: int = 0

    @property
    def weight(self) -> float:
        """The tenant's share when there is a queue."""
        return self.record.weight

    def has_scope(self, *scopes: Scope) -> bool:
        """Whether the key has one of these scopes."""
        return any(scope in self.key.scopes for scope in scopes)


class Authenticator:
    """Looks keys up by digest. A result is kept for less than a second, and no longer than until the next change is seen."""

    def __init__(
        self, link: RedisLink, store: TenantStore, watch: TenancyWatch, pepper: bytes, admin_key: str | None,
        cache_s: float,
    ) -> None:  # fmt: skip
        self._link = link
        self._store = store
        self._watch = watch
        self._pepper = pepper
        self._admin_key = admin_key.encode() if admin_key else None
        self._cache_s = cache_s
        self._cache: dict[str, tuple[float, Principal | None]] = {}
        self._asking: dict[str, asyncio.Task[Principal | None]] = {}

    async def tenant(self, request: web.Request, *scopes: Scope) -> Principal:
        """The tenant behind a request whose key has one of the scopes, `inference` if none is named; raises ApiError 401 or 403."""
        caller = await self._caller(_bearer(request))
        if not caller.has_scope(*(scopes or ("inference",))):
            raise forbidden()
        return caller

    async def admin(self, request: web.Request) -> str:
        """Who it is for the audit; raises ApiError unless the request carries the operator's key, or a key of the admin scope."""
        key = _bearer(request)
        if self._admin_key is not None and hmac.compare_digest(key.encode("utf-8", "replace"), self._admin_key):
            return ROOT_ACTOR
        caller = await self._caller(key)
        if not caller.has_scope("admin"):
            raise forbidden()
        return caller.key_id

    def forget(self) -> None:
        """Look all keys up again: something has changed. What is being looked up just now may be older than that."""
        self._cache.clear()
        self._asking.clear()

    async def _caller(self, key: str) -> Principal:
        digest = key_digest(self._pepper, key)
        caller = None if digest is None else await self._look_up(digest)
        if caller is None or caller.key.is_expired(self._watch.now_ms()):
            raise unauthorized()
        if caller.record.status != "active":
            raise tenant_disabled()
        self._watch.note_use(caller.key_id)
        return caller

    async def _look_up(self, digest: str) -> Principal | None:
        now = time.monotonic()
        known = self._cache.get(digest)
        if known is not None and known[0] > now:
            return known[1]
        asking = self._asking.get(digest)
        if asking is None:
            asking = self._asking[digest] = asyncio.ensure_future(self._ask(digest))
            asking.add_done_callback(partial(self._answered, digest))
        # All that come meanwhile wait for the same answer; one that leaves doesn't take it from the others.
        return await asyncio.shield(asking)

    async def _ask(self, digest: str) -> Principal | None:
        revision = self._watch.revision  # before the look-up: a change that comes in between is seen by the next poll
        asked_s = time.monotonic()
        caller = await self._link.call(self.find(digest, revision))
        if len(self._cache) >= MAX_CACHED_KEYS:
            self._cache.clear()
        if revision == self._watch.revision:
            self._cache[digest] = (asked_s + self._cache_s, caller)
        return caller

    def _answered(self, digest: str, asking: "asyncio.Task[Principal | None]") -> None:
        if self._asking.get(digest) is asking:
            del self._asking[digest]

    async def find(self, digest: str, revision: int) -> Principal | None:
        """The caller behind a key's digest as it's stored now; errors of Redis pass through."""
        key = await self._store.find_digest(digest)
        record = None if key is None else await self._store.tenant(key.tenant)
        # A key older than its tenant was that of another tenant of this id, which was deleted.
        if key is None or record is None or key.created_ms < record.created_ms:
            return None
        return Principal(key.tenant, key.id, digest, record, key, revision)


def tenant_disabled() -> ApiError:
    """403: the key is right, its tenant may do nothing."""
    return ApiError(403, "This tenant has been disabled.", "invalid_request_error", "tenant_disabled")


def _bearer(request: web.Request) -> str:
    values = request.headers.getall("Authorization", [])
    if len(values) != 1:
        raise unauthorized()
    scheme, _, key = values[0].partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise unauthorized()
    return key.strip()
