"""Engines whose model and pages are a GPU's, in Triton's interpreter: the same bits however requests run, and pages looked after where they lie."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.backend import Backend
from kernels.kv_pool import KvPool
from protocol.replies import Done, Failed
from worker import seal_keeper
from worker.cache.page_pool import PageId
from worker.engine_thread import EngineThread
from worker.errors import DeviceLostError
from worker.faults import KINDS, FaultError, inject
from worker.model.decoder import Decoder
from worker.model.load import load_model
from worker.seal_keeper import SealKeeper

LONG = tuple((37 * i + i * i) % 256 for i in range(17))
REQUESTS = [
    {"prompt": (258, *LONG), "logprobs": 2, "max_tokens": 3},
    {"prompt": (258, 5), "temperature": 0.8, "seed": 42, "max_tokens": 3},
    {"prompt": (258, *LONG[:6]), "echo": 1, "max_tokens": 1},
]
# What each fault changes; the others copy or forge seals.
CHANGES = {
    "flip-k": {"k"}, "flip-v": {"v"}, "flip-scale": {"k_scale"}, "flip-lease": {"tags"}, "table-off-by-one": {"table"},
    "freed-page": {"tags"}, "missing-row": {"k", "v"}, "write-after-free": {"k", "v"},
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("ordered_products")


@pytest.fixture(scope="module")
def tiny(lab_of, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """A lab with a tiny mixture of experts."""
    model = tiny_models.make("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    folder: Path = tiny_models.save(model, tmp_path_factory.mktemp("tiny"))
    return lab_of(load_model(folder, Backend.GPU))


@pytest.fixture(scope="module")
def alone(tiny, result_of):
    """Each request's outcome when it runs by itself, cold."""
    return [result_of(tiny.run(tiny.engine(page_size=8), tiny.job(**request))[0]) for request in REQUESTS]


@pytest.mark.parametrize("mode", ["lease", "full"])
def test_together_chunked_and_warm_equal_alone(tiny, result_of, alone, mode) -> None:
    """Prompts in chunks beside decode rows, steps padded to four rows, and all of it again from cached pages, every page verified or not."""
    engine = tiny.engine(page_size=8, kv_tokens=128, step_tokens=7, integrity=mode)
    for _ in range(2):
        together = tiny.run(engine, *(tiny.job(**request) for request in reversed(REQUESTS)))
        assert list(reversed(alone)) == [result_of(replies) for replies in together]
    assert engine.totals.cached_tokens >= 16
    assert 0 == engine.cache.pool.num_held
    assert [] == engine.integrity.take_events()


@pytest.mark.parametrize(("kind", "place"), [("flip-v", 1), ("replayed-page", 0), ("flip-seal", 2), ("flip-scale", 1)])
def test_damage_is_found_in_the_pass_that_reads_it_and_healed(tiny, result_of, alone, kind, place) -> None:
    """Struck before a decode step: found in it, before a token comes of it; the answer is as if nothing had been, and so is a neighbour's."""
    engine = tiny.engine(page_size=8, integrity="full")

    def strike(number: int) -> None:
        if number == 2:
            inject(engine, kind, place=place)

    jobs = (tiny.job(**REQUESTS[0]), tiny.job(**REQUESTS[1]))
    victim, neighbour = tiny.run(engine, *jobs, on_step=strike)
    assert [alone[0], alone[1]] == [result_of(victim), result_of(neighbour)]
    events = engine.integrity.take_events()
    assert {"read"} == {event.kind for event in events}
    assert {0} == {event.layer for event in events}
    assert engine.integrity.totals.healed >= 1


def test_a_prefix_is_verified_before_its_first_use(tiny, result_of, alone) -> None:
    """In `seal` mode a bit that flips in a cached page is found by the next request that would use it."""
    engine = tiny.engine(page_size=8, integrity="seal")
    tiny.run(engine, tiny.job(**REQUESTS[0]))
    page = next(iter(engine.cache.pool.whole_pages()))
    engine.executor.kv.v.view(torch.uint8)[0, page].view(-1)[5] ^= 1
    (replies,) = tiny.run(engine, tiny.job(**REQUESTS[0]))
    assert alone[0] == result_of(replies)
    assert engine.integrity.take_events()


def test_a_lost_page_is_noticed_and_healed(tiny, result_of, alone) -> None:
    """A lease tag that changes between two steps: the request starts over, and answers as if nothing had been."""
    engine = tiny.engine(page_size=8)
    (replies,) = tiny.run(
        engine, tiny.job(**REQUESTS[0]), on_step=lambda number: number == 2 and inject(engine, "flip-lease", place=1)
    )
    assert alone[0] == result_of(replies)
    assert ["lease"] == [event.kind for event in engine.integrity.take_events()]


def test_pages_that_are_not_finite_end_the_request_and_are_zeroed(tiny) -> None:
    """NaN in a page on the device: the request fails, its pages go into quarantine, and are zero after the scrub."""
    engine = tiny.engine(page_size=8)
    pages: list[int] = []

    def spoil(number: int) -> None:
        if number == 2:
            pages.extend(lease.page for lease in engine.scheduler.running[0].table.leases)
            engine.executor.kv.k[:, pages[0]] = float("nan")

    (replies,) = tiny.run(engine, tiny.job(**REQUESTS[0]), on_step=spoil)
    assert isinstance(replies[-1], Failed)
    for _ in range(engine.cache.pool.num_pages):
        engine.scrub()
    kv = engine.executor.kv
    assert 0 == engine.cache.pool.num_quarantined
    assert pages
    assert not bool(kv.k[:, pages].any())
    assert not bool(kv.v[:, pages].any())


def test_faults_strike_pages_where_they_lie(tiny) -> None:
    """Each kind changes the page, its tag or its table on a GPU too; those that need seals say so and change nothing."""
    engine = tiny.engine(page_size=8)
    engine.submit(tiny.job(**REQUESTS[0]))
    engine.step()
    kv, pool = engine.executor.kv, engine.cache.pool

    def everything() -> dict[str, bytes]:
        tensors = {"k": kv.k_rows.view(torch.int16), "v": kv.v.view(torch.int16), "k_scale": kv.k_scale}
        found = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        return found | {"tags": pool.tags.tobytes(), "table": bytes(engine.scheduler.running[0].table.pages)}

    for kind in KINDS:
        before = everything()
        if kind in CHANGES:
            inject(engine, kind, place=1)
        else:
            with pytest.raises(FaultError, match="start it with --integrity seal or full"):
                inject(engine, kind, place=1)
        after = everything()
        assert CHANGES.get(kind, set()) == {name for name in before if before[name] != after[name]}, kind


def raising(error: Exception) -> Callable[..., None]:
    """A function of any arguments that does nothing else."""

    def broken(*_: object, **options: object) -> None:
        raise error

    return broken


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more about it"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA driver error: an illegal memory access was encountered"),
    ],
    ids=["torch", "triton", "driver"],
)
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        (Decoder, "forward", lambda engine: engine.step()),
        (seal_keeper, "open_pages", lambda engine: engine.step()),
        (seal_keeper, "verify_pages", lambda engine: engine.executor.verify([PageId(0)], [0])),
        (SealKeeper, "mend_scales", lambda engine: engine.executor.mend()),
        (KvPool, "scrub", lambda engine: engine.executor.scrub(PageId(0))),
    ],
    ids=["forward", "open", "verify", "mend", "scrub"],
)
def test_a_lost_gpu_ends_the_engine(tiny, monkeypatch, error, place, name, call) -> None:
    """An error of the device itself, whoever tells it and whatever was asked, isn't one batch's: nobody is answered, and the engine doesn't go on."""
    engine = tiny.engine(page_size=8, integrity="full")
    engine.submit(tiny.job(**REQUESTS[1]))
    with monkeypatch.context() as patch:
        patch.setattr(place, name, raising(error))
        with pytest.raises(
            DeviceLostError, match=r"^the GPU failed: [A-Z].* an illegal memory access was encountered$"
        ):
            call(engine)
    assert not [out for out in engine.take_replies() if isinstance(out.envelope.reply, (Done, Failed))]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nand more about it"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "cuda", "triton"],
)
def test_memory_that_ends_is_one_batchs_error(tiny, result_of, alone, monkeypatch, error) -> None:
    """Its requests end, and the worker serves those that come after."""
    engine = tiny.engine(page_size=8, integrity="full")
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", raising(error))
        (replies,) = tiny.run(engine, tiny.job(**REQUESTS[1]))
    assert "internal_error" == replies[-1].code
    (replies,) = tiny.run(engine, tiny.job(**REQUESTS[1]))
    assert alone[1] == result_of(replies)


def test_what_is_asked_between_two_steps_ends_a_lost_gpus_thread_too(tiny, monkeypatch) -> None:
    """The pages of a deleted tenant can't be zeroed: whoever asked is told, and nothing else is tried."""
    engine = tiny.engine(page_size=8)
    thread = EngineThread(engine, lambda replies: None)
    monkeypatch.setattr(KvPool, "scrub", raising(RuntimeError("Triton Error [CUDA]: unspecified launch failure")))
    thread.start()
    asked = thread.call(lambda engine: engine.executor.scrub(PageId(0)))
    with pytest.raises(DeviceLostError):
        asked.result(20)
    asyncio.run(asyncio.wait_for(thread.ended(), 20))
    assert isinstance(thread.failure, DeviceLostError)
