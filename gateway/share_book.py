"""Share groups as they are at the revision that this gateway has seen: whether a caller may use one, and its identity."""

from gateway.errors import ApiError
from gateway.redis_link import RedisLink
from gateway.share_store import ShareStore
from gateway.tenancy_watch import TenancyWatch
from protocol.ids import TenantId
from protocol.tenancy import ShareGroup


class ShareBook:
    """Looked up once for each revision."""

    def __init__(self, link: RedisLink, store: ShareStore, watch: TenancyWatch) -> None:
        self._link = link
        self._store = store
        self._watch = watch
        self._revision: int | None = None
        self._groups: dict[str, ShareGroup] = {}

    async def identity(self, tenant: TenantId, name: str | None) -> str | None:
        """What namespaces know a group by: a later group of the same name is another. Raises ApiError 403 for a tenant that isn't a member,
        whether there is such a group or not.
        """
        if name is None:
            return None
        revision = self._watch.revision
        if self._revision != revision:
            self._groups = {group.name: group for group in await self._link.call(self._store.groups())}
            self._revision = revision
        group = self._groups.get(name)
        if group is None or tenant not in group.tenants:
            raise ApiError(
                403,
                "This tenant is in no share group of that name.",
                "invalid_request_error",
                "share_group_denied",
                "share_group",
            )
        return f"{group.name}@{group.created_ms}"
