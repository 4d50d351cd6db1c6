"""Engines of models with latent attention: the same bits however a request is run, and every kind of damage found and healed."""

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.backend import resolve
from worker.faults import KINDS, FaultError, inject
from worker.model.load import load_model

TABLE_FAULTS = {"flip-lease", "table-off-by-one", "freed-page"}
LONG = tuple(
    (37 * i + i * i) % 256 for i in range(140)
)  # more than a range of keys, and far more than an indexer chooses
REQUESTS = [
    {"prompt": LONG, "temperature": 1.0, "seed": -7, "logprobs": 2},
    {"prompt": (*LONG, 5, 6), "repetition_penalty": 1.3, "max_tokens": 20},
    {"prompt": LONG[40:75], "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 1},
    {"prompt": (1, 2, 3), "max_tokens": 40},
]


@pytest.fixture(scope="module", params=["deepseek_v3", "glm_moe_dsa"])
def lab(request, lab_of: Callable, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """A tiny random model in a lab."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny_models.save(tiny_models.make(request.param), folder)
    return lab_of(load_model(folder, resolve("cpu")))


@pytest.fixture(scope="module", params=["fp16", "fp8"])
def kv_dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(lab, result_of, kv_dtype) -> list:
    """Each request's outcome when it runs by itself, cold."""
    return [result_of(lab.run(lab.engine(kv_dtype=kv_dtype), lab.job(**request))[0]) for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens": 33, "page_size": 2},
        {"kv_tokens": 288, "page_size": 8, "step_tokens": 40},
        {"integrity": "full"},
    ],
    ids=str,
)
def test_together_equals_alone(lab, result_of, kv_dtype, alone, options) -> None:
    """In one batch, in chunks, in a pool so small that sequences are preempted, with every read verified."""
    engine = lab.engine(kv_dtype=kv_dtype, **options)
    order = list(range(len(REQUESTS)))
    random.Random(str(options)).shuffle(order)
    together = lab.run(engine, *(lab.job(**REQUESTS[i]) for i in order))
    if options.get("kv_tokens"):
        assert engine.scheduler.num_preemptions > 0
    for i, replies in zip(order, together, strict=True):
        assert alone[i] == result_of(replies), REQUESTS[i]
    assert 0 == engine.cache.pool.num_held
    assert 0 == engine.integrity.totals.num_violations


def test_warm_equals_cold(lab, result_of, kv_dtype, alone) -> None:
    """From the prefix cache, the second time."""
    engine = lab.engine(kv_dtype=kv_dtype, integrity="seal")
    for _ in range(2):
        for expected, request in zip(alone, REQUESTS, strict=True):
            assert expected == result_of(lab.run(engine, lab.job(**request))[0])
    assert engine.totals.cached_tokens > 100


def strike_once(engine, kind: str, place: int) -> Callable[[int], None]:
    """Damage a page of tenant t's running request between two steps, in a layer that has what the fault needs."""

    def strike(number: int) -> None:
        if number == 6:
            for layer in range(engine.executor.kv.layout.num_layers):
                try:
                    inject(engine, kind, tenant="t", place=place, layer=layer)
                    return
                except FaultError as error:
                    assert "keeps no values" in str(error)
            pytest.skip("this model keeps no values")
        if number == 7:
            assert 1 <= engine.integrity.totals.num_violations
            assert not any(s.num_output > 6 for s in engine.scheduler.running if s.tenant == "t")

    return strike


@pytest.mark.parametrize("kind", KINDS)
def test_full_mode_finds_and_heals_every_kind(lab, result_of, kind) -> None:
    """Found in the next step, in a page that an indexer reads whole; answered as if nothing had been; the neighbour untouched."""
    jobs = {"prompt": LONG, "temperature": 0.8, "seed": 11, "max_tokens": 12}, {"prompt": LONG[:20], "max_tokens": 12}
    clean = [result_of(lab.run(lab.engine(kv_dtype="fp8"), lab.job(**job))[0]) for job in jobs]
    engine = lab.engine(kv_dtype="fp8", integrity="full")
    both = lab.job(**jobs[0]), lab.job(**jobs[1], tenant="other")
    found = lab.run(engine, *both, on_step=strike_once(engine, kind, place=2))
    assert clean == [result_of(replies) for replies in found]
    events = engine.integrity.take_events()
    assert {"lease" if kind in TABLE_FAULTS else "read"} == {event.kind for event in events}
    assert "t" in {event.tenant for event in events}
    assert 0 == engine.cache.pool.num_quarantined
    assert engine.integrity.totals.healed >= 1


def test_random_bit_flips_are_all_found(lab) -> None:
    """Flips anywhere in latent vectors, indexer's keys, scales and seals of a page are found by the walk through the pool."""
    engine = lab.engine(kv_dtype="fp16", integrity="seal", kv_tokens=512)
    kv, generator = engine.executor.kv, torch.Generator().manual_seed(2)
    for _ in range(30):
        lab.run(engine, lab.job(LONG, max_tokens=1))
        page = next(iter(engine.cache.pool.whole_pages()))
        parts = [kv.k[:, page], kv.v[:, page], kv.seals.tags[:, page], kv.k_scale, kv.v_scale]
        parts = [part for part in parts if part.numel()]
        part = parts[int(torch.randint(len(parts), (), generator=generator))]
        flat = part.contiguous().view(torch.uint8).view(-1)
        flat[int(torch.randint(flat.numel(), (), generator=generator))] ^= 1 << int(
            torch.randint(8, (), generator=generator)
        )
        part.copy_(flat.view(part.dtype).view(part.shape))
        before = engine.integrity.totals.num_violations
        for _ in range(engine.cache.pool.num_pages // 16 + 2):
            engine.scrub()
        assert engine.integrity.totals.num_violations > before
        engine.integrity.take_events()
