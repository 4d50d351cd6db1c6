"""Which models and workers there are right now: a picture of Redis that is renewed twice a second."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.errors import ApiError, unavailable
from gateway.intake.call import ServedModel
from gateway.redis_link import RedisLink
from protocol.codec import decode
from protocol.errors import DecodeError
from protocol.ids import ModelName, WorkerId
from protocol.model_card import ModelCard, WorkerStatus
from protocol.scripts import LIVE_MODELS, LIVE_WORKERS

REFRESH_S = 0.5
MAX_CARDS = 64


@dataclass(frozen=True, slots=True)
class Fleet:
    """One picture: live workers' status by model."""

    statuses: dict[ModelName, list[WorkerStatus]] = field(default_factory=dict)
    live: dict[ModelName, set[WorkerId]] = field(default_factory=dict)

    def live_workers(self, model: ModelName) -> set[WorkerId]:
        """Ids of a model's live workers, those of another version whose status we can't read included."""
        return self.live.get(model, set())

    @property
    def num_serving(self) -> int:
        """Workers that take new work."""
        return sum(not status.is_draining for statuses in self.statuses.values() for status in statuses)


class ModelDirectory:
    """Keeps the picture, and the cards of the models in it. `on_refresh` is told each new picture."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._cards: dict[str, ModelCard] = {}
        self.fleet = Fleet()
        self.last_round_s = time.monotonic()
        self._has_looked = False
        self.on_refresh: Callable[[Fleet], None] = lambda fleet: None

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            try:
                await self.refresh()
            except ApiError:
                # The link has logged it. The picture stays as it was, but deadlines go on passing.
                self.on_refresh(self.fleet)
            self.last_round_s = time.monotonic()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Look once; raises ApiError if Redis doesn't answer."""
        client, keys = self._link.commands, self._link.keys
        names = await self._link.call(client.eval(LIVE_MODELS, 1, keys.models))
        statuses: dict[ModelName, list[WorkerStatus]] = {}
        live: dict[ModelName, set[WorkerId]] = {}
        for raw_name in names:
            model = ModelName(raw_name.decode("utf-8", "replace"))
            workers = await self._link.call(client.eval(LIVE_WORKERS, 1, keys.workers(model)))
            ids = [WorkerId(worker.decode("utf-8", "replace")) for worker in workers]
            live[model] = set(ids)
            found = await self._statuses(model, ids)
            if found:
                statuses[model] = found
        self.fleet = Fleet(statuses, live)
        self._has_looked = True
        self.on_refresh(self.fleet)

    async def _statuses(self, model: ModelName, workers: list[WorkerId]) -> list[WorkerStatus]:
        if not workers:
            return []
        status_keys = [self._link.keys.worker(model, worker) for worker in workers]
        found = []
        for raw in await self._link.call(self._link.commands.mget(status_keys)):
            try:
                found.append(decode(WorkerStatus, raw or b""))
            except DecodeError:
                continue  # it expired in between, or a newer worker's status means nothing to us
        return sorted(found, key=lambda status: status.worker_id)

    async def served(self) -> list[ServedModel]:
        """All models with a live worker; raises ApiError."""
        self._check_has_looked()
        models = []
        for name, statuses in sorted(self.fleet.statuses.items()):
            found = await self._known_cards(name, statuses)
            if found:
                limit = min(card.max_request_tokens for card in found.values())
                models.append(ServedModel(name, next(iter(found)), limit))
        return models

    async def cards(self) -> list[ModelCard]:
        """One card for each model with a live worker; raises ApiError."""
        self._check_has_looked()
        found = [await self._known_cards(name, statuses) for name, statuses in sorted(self.fleet.statuses.items())]
        return [next(iter(cards.values())) for cards in found if cards]

    def _check_has_looked(self) -> None:
        """A gateway that has only just started can't say that a model isn't there."""
        if not self._has_looked:
            raise unavailable("This gateway has only just started; try again in a moment.", "starting")

    async def _known_cards(self, model: ModelName, statuses: list[WorkerStatus]) -> dict[str, ModelCard]:
        """A model's cards by digest. One that has just expired, or is of another version, must not take other models with it."""
        found = {}
        for digest in dict.fromkeys(status.card_digest for status in statuses):
            card = await self._card(model, digest)
            if card is not None:
                found[digest] = card
        return found

    async def card(self, digest: str) -> ModelCard:
        """The card under a digest that `served` gave; raises ApiError if it is gone meanwhile."""
        for name, statuses in self.fleet.statuses.items():
            card = await self._card(name, digest) if any(s.card_digest == digest for s in statuses) else None
            if card is not None:
                return card
        raise unavailable("The model's workers have just gone; try again.")

    async def _card(self, model: ModelName, digest: str) -> ModelCard | None:
        if digest not in self._cards:
            raw = await self._link.call(self._link.commands.get(self._link.keys.card(model, digest)))
            try:
                card = decode(ModelCard, raw or b"")
            except DecodeError:
                return None
            if len(self._cards) >= MAX_CARDS:
                self._cards.clear()
            self._cards[digest] = card
        return self._cards[digest]
