"""Decode steps on a GPU as CUDA graphs: one launch a step instead of a dozen a layer.

A graph is recorded for each number of rows (a power of two) and width of the page table (another) at their first use. All of them read
their step from one piece of memory, compute in one workspace and leave their results in one place, none of which ever moves; what
their ops allocate comes from one pool, as no two graphs run at a time. A step is padded with rows at position -1, which read nothing, write nothing
and cost their share of the products. A row's bits don't depend on its batch, so padding changes none. A graph for which there is no memory left is not asked for again: its steps run op by op,
in the same memory.

This was never run on a GPU: none was at hand when it was written. In Triton's interpreter, where there are no graphs, a "graph" is the call that would have been
recorded: everything but `recorder` is what runs on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from kernels.kv_pool import AttentionPlan
from worker.device_errors import is_out_of_memory
from worker.model.step import StepInput
from worker.model.step_memory import StepShape, padding_step, send

_log = structlog.get_logger(__name__)

DecodePass = Callable[[StepInput], torch.Tensor]
"""A pass over a step on the device, whose result float32 [num_rows, ...] is always in the same place for the same step."""
Call = Callable[[], object]
Record = Callable[[Call], Call]
"""From a call that has been made once to one that repeats what it did on the device."""

FEWEST_PAGES = 16


def recorder(device: torch.device) -> Record:
    """Records calls as graphs that share the memory of what is allocated in them: at most one may be running, and nothing allocated outlives it."""
    if device.type != "cuda":
        return lambda call: call
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        # What other threads do with CUDA meanwhile is no error of this one's. If a recording fails, torch's own context leaves the stream as it is.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            call()
        return graph.replay

    return record


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, and where its step and its result are."""

    replay: Call
    step: StepInput
    result: torch.Tensor


class DecodeGraphs:
    """Runs decode steps through recorded graphs. Not thread-safe. A result is overwritten by the next step."""

    def __init__(
        self, compute: DecodePass, max_rows: int, max_pages: int, device: torch.device, record: Record | None = None
    ) -> None:
        """For steps of up to `max_rows` rows and tables of up to `max_pages` pages."""
        self._compute = compute
        self._max_rows = power_of_two(max_rows)
        self._max_pages = max(FEWEST_PAGES, power_of_two(max_pages))
        self._memory = torch.zeros(
            StepShape.of_decode(self._max_rows, self._max_pages, has_check=True).num_bytes,
            dtype=torch.uint8,
            device=device,
        )
        self._record = record or recorder(device)
        self._recorded: dict[StepShape, _Recorded] = {}

    def takes(self, step: StepInput, plan: AttentionPlan) -> bool:
        """Whether this is a step with one row for each sequence, and no larger than there is room for."""
        num_rows, (num_sequences, num_pages) = len(step.token_ids), step.page_table.shape
        is_decode = num_rows == num_sequences == len(plan.singles) and len(step.logit_rows) <= num_rows
        return is_decode and 0 < num_rows <= self._max_rows and num_pages <= self._max_pages

    def run(self, step: StepInput, plan: AttentionPlan) -> tuple[torch.Tensor, StepInput]:
        """What `compute` gives for the step's wanted rows, and the step as it lies on the device; the one given has been checked."""
        shape = self._shape(*step.page_table.shape, has_check=step.seal_check is not None)
        found = self._recorded.get(shape) or self._new(shape, must_record=False)
        send(step, plan, shape, self._memory)
        found.replay()
        return found.result[: len(step.logit_rows)], found.step

    def prepare(self, *, checks_reads: bool) -> None:
        """Record each number of rows with the narrowest table, each table with one row, and the largest step.

        Between them they start every kernel in each way that others will. Large ones come first: what they allocate serves small ones too.
        Raises what torch does if memory ends.
        """
        rows = [1 << n for n in range(self._max_rows.bit_length())]
        pages = [FEWEST_PAGES << n for n in range((self._max_pages // FEWEST_PAGES).bit_length())]
        shapes = {(count, FEWEST_PAGES) for count in rows} | {(1, width) for width in pages} | {(rows[-1], pages[-1])}
        for count, width in sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True):
            if (shape := self._shape(count, width, has_check=checks_reads)) not in self._recorded:
                self._new(shape, must_record=True)

    def _shape(self, num_rows: int, num_pages: int, *, has_check: bool) -> StepShape:
        width = max(FEWEST_PAGES, power_of_two(num_pages))
        return StepShape.of_decode(power_of_two(num_rows), width, has_check=has_check)

    def _new(self, shape: StepShape, *, must_record: bool) -> _Recorded:
        padding = padding_step(shape.num_rows, shape.num_rows, shape.num_pages, has_check=shape.has_check)
        send(padding, padding.rows.planned(), shape, self._memory)
        step, compute = shape.seen_in(self._memory), self._compute
        # The first call compiles kernels, which must not happen while recording.
        result = compute(step)
        replay: Call = partial(compute, step)
        try:
            replay = self._record(replay)
        except RuntimeError as error:
            if must_record or not is_out_of_memory(error):
                raise
            _log.warning("graph_not_recorded", rows=shape.num_rows, pages=shape.num_pages, reason="out of memory")
        found = self._recorded[shape] = _Recorded(replay, step, result)
        return found


def power_of_two(number: int) -> int:
    """The smallest that is no less than a positive number."""
    return 1 << (number - 1).bit_length()
