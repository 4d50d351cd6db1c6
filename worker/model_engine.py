"""From settings to an engine that runs a model."""

import secrets
import time
from collections.abc import Callable
from functools import partial

from kernels.backend import Backend, describe, resolve
from kernels.errors import KernelError
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from protocol.model_card import ModelCard
from protocol.routing import RoutingKeys
from worker.cache.namespace import NamespaceRing
from worker.engine import Engine, EngineParts
from worker.kv_scales import KvScales, choose
from worker.model.load import LoadedModel, load_model
from worker.model.token_bytes import token_bytes
from worker.model_executor import ModelExecutor
from worker.prepared import Prepared
from worker.settings import WorkerSettings


def preparation(settings: WorkerSettings) -> Callable[[], Prepared]:
    """The function that loads the model; raises KernelError at once, the function ModelError."""
    backend = resolve(settings.kernels, settings.activations_bits)
    if backend is Backend.GPU:
        raise KernelError("kernels: models don't run on GPUs yet, only the kernels do; choose cpu or ref")
    return partial(_prepare, settings, backend)


def _prepare(settings: WorkerSettings, backend: Backend) -> Prepared:
    assert settings.model_path is not None
    loaded = load_model(settings.model_path, backend)
    layout = loaded.kv_layout(settings.num_pages, settings.page_size, settings.kv_dtype)
    scales = choose(settings.kv_scales, settings.model_path, loaded.digest, layout, loaded.kv_scales)
    kv = _kv_pool(layout, scales, settings)
    card = _card(loaded, settings, int(settings.model_path.stat().st_mtime))
    facts = {
        "kv_dtype": settings.kv_dtype, "kv_scales": scales.origin, "kv_bytes": kv.nbytes, "integrity": settings.integrity,
        **describe(backend),
    }  # fmt: skip
    kv_format = f"{settings.kv_dtype}/page{settings.page_size}/scales-{scales.fingerprint}/activations{settings.activations_bits}/v1"
    return Prepared(card, _engine(loaded, kv, kv_format, settings, card.max_request_tokens, backend), facts)


def _kv_pool(layout: KvLayout, scales: KvScales, settings: WorkerSettings) -> KvPool:
    """Seals are made of numbers that only this process knows, and that end with it, as its pages do."""
    secret = secrets.token_bytes(32) if settings.integrity in {"seal", "full"} else None
    return KvPool.allocate(layout, scales.k, scales.v, seal_secret=secret)


def _card(loaded: LoadedModel, settings: WorkerSettings, created_s: int) -> ModelCard:
    """What gateways are told of the model."""
    config = loaded.config
    return ModelCard(
        name=settings.model_name,
        digest=loaded.digest,
        architecture=config.architecture,
        context_length=config.context_length,
        max_request_tokens=min(config.context_length, settings.num_pages * settings.page_size),
        tokenizer=loaded.tokenizer,
        created_s=created_s,
        kv_dtype=settings.kv_dtype,
        activations_bits=settings.activations_bits,
    )


def _engine(
    loaded: LoadedModel,
    kv: KvPool,
    kv_format: str,
    settings: WorkerSettings,
    max_request_tokens: int,
    backend: Backend,
) -> Engine:
    parts = EngineParts(
        executor=ModelExecutor(loaded.model, kv, backend, checks_reads=settings.integrity == "full"),
        namespaces=NamespaceRing(settings.namespace_secret, loaded.digest, kv_format),
        token_bytes=tuple(token_bytes(loaded.tokenizer)),
        eos_token_ids=frozenset(loaded.tokenizer.eos_token_ids),
        max_request_tokens=max_request_tokens,
        worker_id=settings.worker_id,
        checks_leases=settings.integrity != "off",
        now=time.monotonic,
        now_ms=lambda: time.time_ns() // 1_000_000,
        routing=RoutingKeys(settings.routing_key) if settings.routing_key else None,
    )
    return Engine(parts, settings.max_sequences, settings.step_tokens)
