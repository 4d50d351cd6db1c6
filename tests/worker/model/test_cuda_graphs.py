"""Padded decode steps at fixed addresses, through real kernels in Triton's interpreter: there is no GPU to record a graph on.

What stands in for a graph is the call that would have been recorded, which reads and writes where it did the first time.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.backend import Backend
from kernels.embedding import embedding
from kernels.kv_pool import KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.matmul import matmul
from kernels.paged_attention import paged_attention
from kernels.placement import place
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.weights import Int4Weight, Int8Weight
from worker.model.cuda_graphs import DecodeGraphs, recorder
from worker.model.step import StepInput
from worker.model.step_memory import StepShape, padding_step, send

GPU, CPU = Backend.GPU, torch.device("cpu")
HEADS, DIM, HIDDEN, VOCABULARY = 2, 16, 32, 20
PAGE, PAGES = 8, 12

pytestmark = pytest.mark.usefixtures("ordered_products")


def step_of(positions: list[int], tables: list[list[int]], wanted: list[int] | None = None) -> StepInput:
    """A decode step with one row for each sequence."""
    count = len(positions)
    slots = [
        table[position // PAGE] * PAGE + position % PAGE for position, table in zip(positions, tables, strict=True)
    ]
    return StepInput(
        token_ids=torch.arange(3, 3 + count),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        page_table=torch.tensor(tables, dtype=torch.int32),
        row_sequence=torch.arange(count, dtype=torch.int32),
        logit_rows=torch.arange(count) if wanted is None else torch.tensor(wanted, dtype=torch.int64),
    )


def on_device(step: StepInput) -> StepInput:
    """The step as an op by op pass sees it, not padded at all."""
    plan = step.rows.planned()
    shape = StepShape.of(step, plan, step.page_table.shape[1])
    memory = torch.full((shape.num_bytes,), 0xAA, dtype=torch.uint8)
    send(step, plan, shape, memory)
    return shape.seen_in(memory)


class OneLayer:
    """Embedding, attention with rotary embedding, and a head: a decode step in small."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pool = KvPool.allocate(KvLayout(1, PAGES, HEADS, DIM, PAGE, "fp8"), backend=GPU)
        self.pool.k.random_(0, 0x7F)
        self.pool.v.random_(0, 0x7F)
        scale = torch.rand(3 * HIDDEN, 1).half() / 10
        codes = torch.randint(0, 16, (3 * HIDDEN, HIDDEN), dtype=torch.uint8)
        self.qkv = place(Int4Weight.from_codes(codes, scale, -scale, 32), GPU)
        numbers = torch.randint(-128, 128, (VOCABULARY, HIDDEN), dtype=torch.int8)
        self.head = place(Int8Weight.from_codes(numbers, torch.rand(VOCABULARY, 1).half() / 100, None, 32), GPU)
        self.table = rotary_table(torch.rand(DIM // 2), PAGES * PAGE)
        self.memory = torch.full((16, VOCABULARY), float("nan"))
        self.seen: list[StepInput] = []

    def __call__(self, step: StepInput) -> torch.Tensor:
        """Logits of the wanted rows."""
        self.seen.append(step)
        qkv = matmul(embedding(step.token_ids, self.head, backend=GPU), self.qkv, backend=GPU).view(-1, 3, HEADS, DIM)
        q, k, v = qkv.unbind(dim=1)
        for heads in (q, k):
            rotary(heads, step.positions, self.table, backend=GPU)
        kv_write(k, v, step.slots, self.pool, 0, backend=GPU)
        attended = paged_attention(q, self.pool, 0, step.rows, softmax_scale=0.25, backend=GPU)
        x = attended.flatten(1)[step.logit_rows]
        return matmul(x, self.head, self.memory[: len(x)], backend=GPU)


def run(graphs: DecodeGraphs, step: StepInput) -> torch.Tensor:
    """A step that must be taken."""
    plan = step.rows.planned()
    assert graphs.takes(step, plan)
    return graphs.run(step, plan)[0].clone()


def graphs_of(compute: OneLayer, **options) -> DecodeGraphs:
    """For up to eight rows and all pages."""
    return DecodeGraphs(compute, 8, PAGES, CPU, **options)


def test_padding_changes_no_bit_and_no_page():
    """Three rows padded to four, with a page table padded to sixteen, give the logits and the pages of the three."""
    alone, padded = OneLayer(), OneLayer()
    step = step_of([20, 0, 9], [[3, 5, 1], [7, 0, 0], [2, 8, 0]])
    expected = alone(on_device(step))
    assert torch.equal(expected, run(graphs_of(padded), step))
    assert torch.equal(alone.pool.k, padded.pool.k)
    assert torch.equal(alone.pool.v, padded.pool.v)


def test_the_memory_holds_nothing_of_the_step_before():
    """After a step of four rows, one of three in the same memory computes and stores its own rows only; so does one of another shape."""
    alone, used = OneLayer(), OneLayer()
    before, step, one = (
        step_of([20, 0, 9, 4], [[3, 5, 1], [7, 0, 0], [2, 8, 0], [9, 0, 0]]),
        step_of([21, 1, 10], [[3, 5, 1], [7, 0, 0], [2, 8, 0]]),
        step_of([5], [[9]]),
    )
    graphs = graphs_of(used)
    run(graphs, before)
    pages = used.pool.k[:, 9].clone()
    alone(on_device(before))
    assert torch.equal(alone(on_device(step)).clone(), run(graphs, step))
    assert torch.equal(pages, used.pool.k[:, 9])
    assert torch.equal(alone(on_device(one)).clone(), run(graphs, one))
    assert torch.equal(alone.pool.k, used.pool.k)


def test_some_rows_logits():
    """Only the wanted rows' logits come back, in the order asked for; none, if none is wanted."""
    layer = OneLayer()
    graphs = graphs_of(layer)
    tables = [[3, 5, 1], [7, 0, 0], [2, 8, 0]]
    every = run(graphs, step_of([20, 0, 9], tables))
    assert torch.equal(every[[2, 0]], run(graphs, step_of([20, 0, 9], tables, [2, 0])))
    assert (0, VOCABULARY) == tuple(run(graphs, step_of([20, 0, 9], tables, [])).shape)


def test_a_graph_reads_where_it_was_recorded():
    """Each shape is recorded once, after a call that compiles what it needs, and never sees its step anywhere else."""
    layer, replays = OneLayer(), []

    def record(call: Callable[[], object]) -> Callable[[], object]:
        call()
        return lambda: replays.append(call)

    graphs = graphs_of(layer, record=record)
    for positions in ([20, 0, 9], [21, 1, 10], [22, 2, 11]):
        run(graphs, step_of(positions, [[3, 5, 1], [7, 0, 0], [2, 8, 0]]))
    assert 2 == len(layer.seen)
    assert 3 == len(replays)
    first, second = (vars_of(step) for step in layer.seen)
    assert first == second
    assert [22, 2, 11, -1] == layer.seen[0].positions.tolist()


def without_room(call: Callable[[], object]) -> Callable[[], object]:
    """A recorder for which there is no memory, which CUDA says in its own way while recording."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    finally:
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


def test_without_memory_for_a_graph_its_steps_run_op_by_op():
    """The same bits, and nobody tries to record that shape again; at the start it's an error, as all else about memory is."""
    alone, layer, tries = OneLayer(), OneLayer(), []
    graphs = graphs_of(layer, record=lambda call: tries.append(call) or without_room(call))
    for positions in ([20, 0, 9], [21, 1, 10]):
        step = step_of(positions, [[3, 5, 1], [7, 0, 0], [2, 8, 0]])
        assert torch.equal(alone(on_device(step)), run(graphs, step))
    assert torch.equal(alone.pool.k, layer.pool.k)
    assert 1 == len(tries)
    with pytest.raises(torch.AcceleratorError):
        graphs_of(layer, record=without_room).prepare(checks_reads=False)


def test_other_errors_of_a_recording_are_no_matter_of_memory():
    """They aren't hidden behind a slower way."""

    def broken(call: Callable[[], object]) -> Callable[[], object]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        run(graphs_of(OneLayer(), record=broken), step_of([5], [[9]]))


def vars_of(step: StepInput) -> dict[str, int]:
    """Where a step's numbers are."""
    return {
        name: getattr(step, name).data_ptr()
        for name in ("token_ids", "positions", "slots", "page_table", "row_sequence", "logit_rows")
    }


def test_a_recorder_asks_torch_for_what_torch_has(monkeypatch):
    """One pool of memory for all graphs, calls made while recording, and arguments that torch's own context takes. What it records only a GPU can tell.

    A recording that fails leaves the stream: torch's own context wouldn't.
    """
    contexts, graphs, streams = [], [], ["usual"]
    signature = inspect.signature(torch.cuda.graph)

    @contextmanager
    def recording(*args: object, **options: object) -> Iterator[None]:
        contexts.append(signature.bind(*args, **options).arguments)
        yield
        contexts.append("end")

    class Graph:
        def __init__(self) -> None:
            graphs.append(self)

        def replay(self) -> str:
            return "replayed"

    @contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    def failing() -> None:
        assert ["usual", "own"] == streams
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "own")
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    record = recorder(torch.device("cuda"))
    replays = [record(lambda: contexts.append("called")) for _ in range(2)]
    first, second = (
        {"cuda_graph": graph, "pool": (0, 7), "stream": "own", "capture_error_mode": "thread_local"} for graph in graphs
    )
    assert [first, "called", "end", second, "called", "end"] == contexts
    assert ["replayed"] * 2 == [replay() for replay in replays]
    with pytest.raises(torch.AcceleratorError):
        record(failing)
    assert ["usual"] == streams


def test_preparing_changes_no_page():
    """All numbers of rows and all widths are recorded between them, from padding."""
    layer, recorded = OneLayer(), []
    layer.pool = KvPool.allocate(KvLayout(1, 100, HEADS, DIM, PAGE, "fp8"), backend=GPU)
    before = layer.pool.k.clone()
    graphs = DecodeGraphs(layer, 5, 100, CPU, record=lambda call: recorded.append(call) or call)
    graphs.prepare(checks_reads=False)
    shapes = {tuple(step.page_table.shape) for step in layer.seen}
    assert {(rows, 16) for rows in (1, 2, 4, 8)} | {(1, width) for width in (32, 64, 128)} | {(8, 128)} == shapes
    assert len(shapes) == len(recorded)
    assert torch.equal(before, layer.pool.k)
    run(graphs, step_of([20, 0, 9], [[3, 5, 1], [7, 0, 0], [2, 8, 0]]))
    assert len(shapes) == len(recorded)


@pytest.mark.parametrize(
    ("rows", "sequences", "wanted", "pages", "expected"),
    [
        (3, 3, 3, 2, True), (1, 1, 1, 2, True), (4, 3, 3, 2, False), (3, 3, 1, 2, True), (9, 9, 9, 2, False), (8, 8, 8, 2, True),
        (2, 3, 2, 2, False), (2, 2, 2, 16, True), (2, 2, 2, 17, False),
    ],
)  # fmt: skip
def test_only_decode_steps_are_taken(rows, sequences, wanted, pages, expected):
    """Prompts, sequences without a row, more rows or pages than there may be go another way."""
    step = StepInput(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int32),
        slots=torch.zeros(rows, dtype=torch.int64),
        page_table=torch.zeros(sequences, pages, dtype=torch.int32),
        row_sequence=torch.arange(rows, dtype=torch.int32).clamp(max=sequences - 1),
        logit_rows=torch.arange(wanted),
    )
    assert expected is graphs_of(OneLayer()).takes(step, step.rows.planned())


def test_a_step_fits_its_shape_whatever_was_there():
    """Every number arrives, everything beyond it is padding, and each kind begins at a multiple of 64 bytes."""
    step = padding_step(7, 2, 3, has_check=True)
    step.positions.copy_(torch.arange(7))
    step.slots.copy_(torch.arange(7) * 5)
    step.page_table.copy_(torch.arange(9).view(3, 3))
    plan = step.rows.planned()
    assert ([[0, 1], [1, 1]], [[2, 5]]) == (plan.singles.tolist(), plan.tiles.tolist())
    step.seal_check.page_keys.copy_(torch.arange(9).view(3, 3) - 1)
    step.seal_check.num_tokens.copy_(torch.tensor([3, 9, 20]))
    shape = StepShape(9, 4, 16, 8, 3, 1, has_check=True)
    memory = torch.full((shape.num_bytes + 8,), 0xAA, dtype=torch.uint8)
    send(step, plan, shape, memory)
    seen = shape.seen_in(memory)
    assert [*range(7), -1, -1] == seen.positions.tolist()
    assert [0, 5, 10, 15, 20, 25, 30, -1, -1] == seen.slots.tolist()
    assert [0, 1, 2, 2, 2, 2, 2, 0, 0] == seen.row_sequence.tolist()
    assert [0, 1, 2, 3, 4, 5, 6, 0] == seen.logit_rows.tolist()
    assert [[0, 1], [1, 1], [2, 1]] == seen.plan.singles.tolist()
    assert [[2, 5]] == seen.plan.tiles.tolist()
    assert step.page_table.tolist() == seen.page_table[:3, :3].tolist()
    assert 36 == int(seen.page_table.sum())
    assert bool((memory[shape.num_bytes :] == 0xAA).all())
    check = seen.seal_check
    assert step.seal_check.page_keys.tolist() == check.page_keys[:3, :3].tolist()
    assert 27 == int(check.page_keys.sum())
    assert ([3, 9, 20, 0], [0, 0, 0, 0]) == (check.num_tokens.tolist(), check.violations.tolist())
    others = (seen.plan.singles, seen.plan.tiles, check.page_keys, check.num_tokens, check.violations)
    places = [*vars_of(seen).values(), *(tensor.data_ptr() for tensor in others)]
    assert {0} == {(place - memory.data_ptr()) % 64 for place in places}
