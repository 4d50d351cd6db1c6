"""From settings to an engine that plays a model."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import structlog

from protocol.model_card import ModelCard
from protocol.routing import RoutingKeys
from worker.cache.namespace import NamespaceRing
from worker.engine import Engine, EngineParts
from worker.model.token_bytes import token_bytes
from worker.prepared import Prepared
from worker.settings import SyntheticSettings, WorkerSettings
from worker.synthetic.executor import SyntheticExecutor
from worker.synthetic.vocabulary import tokenizer_spec

_log = structlog.get_logger(__name__)

_DIGEST = hashlib.sha256(b"sluicegate synthetic model 1").hexdigest()
# All workers must publish the same card, whenever and wherever they start: 2026-01-01.
_CREATED_S = 1767225600


def preparation(settings: WorkerSettings) -> Callable[[], Prepared]:
    """The function that makes the engine."""
    assert settings.synthetic is not None
    return partial(_prepare, settings, settings.synthetic)


def _prepare(settings: WorkerSettings, synthetic: SyntheticSettings) -> Prepared:
    facts = {"engine": "synthetic", **asdict(synthetic)}
    _log.warning("engine_is_synthetic", model=settings.model_name, note="answers are made up, no model is loaded")
    card = _card(settings, synthetic)
    return Prepared(card, _engine(settings, synthetic, card), facts)


def _card(settings: WorkerSettings, synthetic: SyntheticSettings) -> ModelCard:
    return ModelCard(
        name=settings.model_name,
        digest=_DIGEST,
        architecture="synthetic",
        context_length=synthetic.context_length,
        max_request_tokens=min(synthetic.context_length, settings.num_pages * settings.page_size),
        tokenizer=tokenizer_spec(),
        created_s=_CREATED_S,
        kv_dtype="none",
        is_synthetic=True,
    )


def _engine(settings: WorkerSettings, synthetic: SyntheticSettings, card: ModelCard) -> Engine:
    parts = EngineParts(
        executor=SyntheticExecutor(synthetic, settings.num_pages, settings.page_size),
        namespaces=NamespaceRing(settings.namespace_secret, _DIGEST, f"none/page{settings.page_size}/v1"),
        token_bytes=tuple(token_bytes(card.tokenizer)),
        eos_token_ids=frozenset(card.tokenizer.eos_token_ids),
        max_request_tokens=card.max_request_tokens,
        worker_id=settings.worker_id,
        checks_leases=settings.integrity != "off",
        now=time.monotonic,
        now_ms=lambda: time.time_ns() // 1_000_000,
        routing=RoutingKeys(settings.routing_key) if settings.routing_key else None,
    )
    return Engine(parts, settings.max_sequences, settings.step_tokens)
