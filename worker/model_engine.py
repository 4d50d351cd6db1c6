"""From settings to an engine that runs a model."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kernels.backend import Backend, describe, resolve
from kernels.kv_layout import KvLayout
from kernels.kv_pool import KvPool
from protocol.model_card import ModelCard
from protocol.routing import RoutingKeys
from worker.cache.namespace import NamespaceRing
from worker.device_errors import device_work, is_out_of_memory
from worker.engine import Engine, EngineParts
from worker.errors import SettingsError
from worker.kv_scales import KvScales, choose
from worker.model.load import LoadedModel, load_model
from worker.model.token_bytes import token_bytes
from worker.model_executor import ModelExecutor
from worker.prepared import Prepared
from worker.settings import WorkerSettings

GIB = 1 << 30


def preparation(settings: WorkerSettings) -> Callable[[], Prepared]:
    """The function that loads the model; raises KernelError at once, the function ModelError, SettingsError or DeviceLostError."""
    backend = resolve(settings.kernels, settings.activations_bits)
    return partial(_prepare, settings, backend)


@device_work()
def _prepare(settings: WorkerSettings, backend: Backend) -> Prepared:
    assert settings.model_path is not None
    with _room_for(f"model {settings.model_name}: the GPU's memory is too small for its weights"):
        loaded = load_model(settings.model_path, backend)
    layout = loaded.kv_layout(settings.num_pages, settings.page_size, settings.kv_dtype)
    scales = choose(settings.kv_scales, settings.model_path, loaded.digest, layout, loaded.kv_scales)
    pool = f"a KV pool of {settings.kv_tokens} tokens ({layout.num_pages * layout.page_bytes / GIB:.2f} GiB)"
    with _room_for(f"kv_tokens: beside the weights the GPU has no room for {pool}"):
        kv = _kv_pool(layout, scales, settings, backend)
    with _room_for(
        f"kv_tokens, step_tokens, max_sequences: beside weights and KV pool the GPU has no room for steps of {settings.step_tokens} tokens "
        f"and {settings.max_sequences} sequences"
    ):
        executor = ModelExecutor(loaded.model, kv, backend, checks_reads=settings.integrity == "full")
        executor.prepare(settings.max_sequences, settings.step_tokens)
    card = _card(loaded, settings, int(settings.model_path.stat().st_mtime))
    facts = {
        "kv_dtype": settings.kv_dtype, "kv_scales": scales.origin, "kv_bytes": kv.nbytes, "integrity": settings.integrity,
        **describe(backend),
    }  # fmt: skip
    kv_format = f"{settings.kv_dtype}/page{settings.page_size}/scales-{scales.fingerprint}/activations{settings.activations_bits}/v1"
    return Prepared(card, _engine(loaded, executor, kv_format, settings, card.max_request_tokens), facts)


@contextmanager
def _room_for(problem: str) -> Iterator[None]:
    """Raise SettingsError where a GPU's memory ends."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError(problem) from None


def _kv_pool(layout: KvLayout, scales: KvScales, settings: WorkerSettings, backend: Backend) -> KvPool:
    """Seals are made of numbers that only this process knows, and that end with it, as its pages do."""
    secret = secrets.token_bytes(32) if settings.integrity in {"seal", "full"} else None
    return KvPool.allocate(layout, scales.k, scales.v, secret, backend)


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
    executor: ModelExecutor,
    kv_format: str,
    settings: WorkerSettings,
    max_request_tokens: int,
) -> Engine:
    parts = EngineParts(
        executor=executor,
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
