"""Says that this worker lives, while its engine makes progress, and what it serves."""

import asyncio
import hashlib
import os
from collections.abc import Callable

import structlog

from protocol.codec import encode
from protocol.ids import WorkerId
from protocol.model_card import ModelCard, WorkerStatus
from protocol.scripts import ANNOUNCE_MODEL, HEARTBEAT
from worker.engine_thread import EngineThread
from worker.redis_link import NETWORK_ERRORS, RedisLink
from worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)


class Heartbeat:
    """Renews the worker's status and its model's card. `is_draining` is asked each time."""

    def __init__(
        self, link: RedisLink, card: ModelCard, engine: EngineThread, settings: WorkerSettings,
        is_draining: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._link = link
        self._card = encode(card)
        self._card_digest = hashlib.sha256(self._card).hexdigest()
        self._model = card.name
        self._engine = engine
        self._settings = settings
        self._is_draining = is_draining
        self._is_stalled = False

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            try:
                await self.beat()
            except NETWORK_ERRORS as error:
                self._link.failed(error)  # the next beat tries again; readers see the status expire meanwhile
            await asyncio.sleep(self._settings.heartbeat_s)

    async def beat(self) -> None:
        """One beat; none if the engine is stuck."""
        is_stalled = not self._engine.is_progressing(self._settings.stall_s)
        if is_stalled != self._is_stalled:
            _log.error("engine_stalled" if is_stalled else "engine_goes_on", stall_s=self._settings.stall_s)
            self._is_stalled = is_stalled
        if is_stalled:
            return
        keys, worker_id = self._link.keys, self._settings.worker_id
        card_key = keys.card(self._model, self._card_digest)
        ttl_ms = int(self._settings.liveness_ttl_s * 1000)
        has_card = await self._link.commands.eval(
            HEARTBEAT, 3, keys.workers(self._model), keys.worker(self._model, worker_id), card_key,
            worker_id, encode(self._status()), ttl_ms,
        )  # fmt: skip
        if not has_card:
            await self._link.commands.set(card_key, self._card, px=ttl_ms * 10)
        await self._link.commands.eval(ANNOUNCE_MODEL, 1, keys.models, self._model, ttl_ms)
        self._link.answered()

    async def leave(self) -> None:
        """Stop counting as alive, at once."""
        keys, worker_id = self._link.keys, self._settings.worker_id
        await self._link.commands.zrem(keys.workers(self._model), worker_id)
        await self._link.commands.delete(keys.worker(self._model, worker_id))

    def _status(self) -> WorkerStatus:
        gauges = self._engine.gauges
        return WorkerStatus(
            worker_id=WorkerId(self._settings.worker_id),
            model=self._model,
            card_digest=self._card_digest,
            pages_total=gauges.pages_total,
            pages_free=gauges.pages_free,
            pages_cached=gauges.pages_cached,
            running_sequences=gauges.running_sequences,
            waiting_sequences=gauges.waiting_sequences,
            max_sequences=self._settings.max_sequences,
            prompt_tokens=gauges.prompt_tokens,
            cached_tokens=gauges.cached_tokens,
            generated_tokens=gauges.generated_tokens,
            engine_steps=gauges.engine_steps,
            preemptions=gauges.preemptions,
            failed_requests=gauges.failed_requests,
            integrity_violations=gauges.integrity_violations,
            batch_sizes=gauges.batch_sizes,
            batched_sequences=gauges.batched_sequences,
            integrity=gauges.integrity,
            integrity_mode=self._settings.integrity,
            is_draining=self._is_draining(),
            pid=os.getpid(),
        )
