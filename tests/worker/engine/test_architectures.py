"""The promise of the same bits, through the engine, for models with experts and with windows."""

from pathlib import Path
from types import ModuleType

import pytest

from kernels.backend import resolve
from worker.faults import inject
from worker.model.load import load_model

LONG = tuple((37 * i + i * i) % 256 for i in range(90))
REQUESTS = [
    {"prompt": (258, *LONG), "logprobs": 3, "max_tokens": 20},
    {"prompt": (258, *LONG[:40], 7), "temperature": 0.8, "seed": 42, "logprobs": 2, "max_tokens": 30},
    {"prompt": (258, 5), "temperature": 1.0, "seed": -7, "n": 2, "max_tokens": 12},
    {"prompt": (258, *LONG, 9), "echo": 1, "max_tokens": 3},
]


@pytest.fixture(scope="module", params=["qwen3_moe", "gemma3", "glm4_moe"])
def tiny(request, lab, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """A lab with a tiny model."""
    folder: Path = tiny_models.save(tiny_models.make(request.param), tmp_path_factory.mktemp(request.param))
    return type(lab)(load_model(folder, resolve("cpu")))


@pytest.fixture(scope="module")
def alone(tiny, result_of):
    """Each request's outcome when it runs by itself, cold."""
    return [result_of(tiny.run(tiny.engine(kv_dtype="fp8"), tiny.job(**request))[0]) for request in REQUESTS]


@pytest.mark.parametrize(
    "options", [{}, {"step_tokens": 33}, {"kv_tokens": 224, "page_size": 8, "step_tokens": 40}, {"integrity": "full"}], ids=str
)  # fmt: skip
def test_together_and_warm_equal_alone(tiny, result_of, alone, options) -> None:
    """In one batch, in chunks, in a pool so small that sequences are preempted, verified in every pass; and again from the cache."""
    engine = tiny.engine(kv_dtype="fp8", **options)
    for _ in range(2):
        together = tiny.run(engine, *(tiny.job(**request) for request in reversed(REQUESTS)))
        assert list(reversed(alone)) == [result_of(replies) for replies in together]
    if "kv_tokens" in options:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert engine.totals.cached_tokens > 100
    assert 0 == engine.cache.pool.num_held


def test_a_flipped_bit_is_found_and_healed(tiny, result_of, alone) -> None:
    """A page that is read again in a later step is verified then, in layers without a window at least, and the answer stays."""
    engine = tiny.engine(kv_dtype="fp8", integrity="full")

    def strike(number: int) -> None:
        if number == 5:
            windows = tiny.loaded.config.windows
            inject(engine, "flip-k", tenant="t", place=1, layer=windows.index(None) if windows else 1)

    (replies,) = tiny.run(engine, tiny.job(**REQUESTS[0]), on_step=strike)

    assert alone[0] == result_of(replies)
    assert engine.integrity.totals.num_violations >= 1
