"""Prices of models in Redis, and what a gateway remembers of them."""

from typing import Any

from gateway.records import Records
from gateway.redis_link import RedisLink
from gateway.tenancy_watch import TenancyWatch
from gateway.tenant_store import MissingError
from protocol.audit import AuditRecord
from protocol.ids import ModelName
from protocol.key_space import KeySpace
from protocol.limits import FREE, Price


class PriceStore:
    """Reads and writes through one Redis client; errors of the client pass through."""

    def __init__(self, client: Any, keys: KeySpace, pepper: bytes, actor: str = "cli") -> None:
        self._place = keys.prices
        self._actor = actor
        self._records = Records(client, keys, pepper)

    async def prices(self) -> dict[str, Price]:
        """All prices by model."""
        return dict(sorted((await self._records.all(self._place, Price)).items()))

    async def set(self, model: ModelName, price: Price) -> None:
        """Set a model's price. What is being answered keeps the price that it began with."""
        if await self._records.get(self._place, model, Price) != price:
            await self._records.put(self._place, model, price, AuditRecord("price.set", self._actor, model=model))

    async def remove(self, model: ModelName) -> None:
        """Make a model free; raises MissingError if it has no price."""
        if not await self._records.remove(self._place, model, AuditRecord("price.removed", self._actor, model=model)):
            raise MissingError(f"model {model!r} has no price")


class PriceBook:
    """The prices as they are at the revision that this gateway has seen."""

    def __init__(self, link: RedisLink, store: PriceStore, watch: TenancyWatch) -> None:
        self._link = link
        self._store = store
        self._watch = watch
        self._revision: int | None = None
        self._prices: dict[str, Price] = {}

    async def of(self, model: str) -> Price:
        """A model's price, FREE if it has none; raises ApiError if Redis doesn't answer."""
        revision = self._watch.revision
        if self._revision != revision:
            self._prices = await self._link.call(self._store.prices())
            self._revision = revision
        return self._prices.get(model, FREE)
