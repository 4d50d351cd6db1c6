"""Decode steps on a GPU as CUDA graphs: one launch a step instead of a dozen a layer.

A graph is recorded for each number of rows (a power of two) and width of the page table (another) at their first use, over buffers that
stay where they are; a step is copied into them, padded with rows at position -1, which read nothing, write nothing and cost their share
of the products. A row's bits don't depend on its batch, so padding changes none.

This was never run on a GPU: none was at hand when it was written. What is tested, without graphs, is that padded steps in the fixed
buffers give the bits of the steps themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.kv_pool import AttentionRows
from worker.model.step import StepInput

Compute = Callable[[StepInput, AttentionRows], torch.Tensor]
"""The forward pass over tensors on the device, without a look at their numbers: float32 [num_rows, ...], one row for each row."""

_FEWEST_PAGES = 16
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A padded step at fixed addresses, what is computed from it, and the graph that does so (none without CUDA)."""

    step: StepInput
    rows: AttentionRows
    result: torch.Tensor | None
    graph: torch.cuda.CUDAGraph | None


class DecodeGraphs:
    """Runs decode steps through recorded graphs. Not thread-safe. Results are overwritten by the next step of the same shape."""

    def __init__(self, compute: Compute, max_rows: int, device: torch.device) -> None:
        self._compute = compute
        self._max_rows = max_rows
        self._device = device
        self._buffers: dict[tuple[int, int], _Buffers] = {}

    def takes(self, step: StepInput) -> bool:
        """Whether this is a step with one row for each sequence, all of whose logits are wanted."""
        num_rows = len(step.token_ids)
        return 0 < num_rows <= self._max_rows and num_rows == len(step.page_table) == len(step.logit_rows)

    def run(self, step: StepInput) -> torch.Tensor:
        """What `compute` gives for the step, which lies on the CPU and has been checked."""
        num_rows, num_pages = step.page_table.shape
        key = (_power_of_two(num_rows), max(_FEWEST_PAGES, _power_of_two(num_pages)))
        if key not in self._buffers:
            self._buffers[key] = self._record(*key)
        buffers = self._buffers[key]
        _fill(buffers.step, step)
        if buffers.graph is None or buffers.result is None:
            return self._compute(buffers.step, buffers.rows)[:num_rows]
        buffers.graph.replay()
        return buffers.result[:num_rows]

    def _record(self, num_rows: int, num_pages: int) -> _Buffers:
        step = _padding(num_rows, num_pages)
        plan = step_rows(step).to(self._device)
        placed = StepInput(
            token_ids=step.token_ids.to(self._device),
            positions=plan.row_position,
            slots=step.slots.to(self._device),
            page_table=plan.page_table,
            row_sequence=plan.row_sequence,
            logit_rows=step.logit_rows.to(self._device),
        )
        if self._device.type != "cuda":
            return _Buffers(placed, plan, None, None)
        # Kernels are compiled at their first launch, which must not happen while recording. Padding touches no page.
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                self._compute(placed, plan)
        torch.cuda.current_stream(self._device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._compute(placed, plan)
        return _Buffers(placed, plan, result, graph)


def step_rows(step: StepInput) -> AttentionRows:
    """What each row of a step attends to."""
    return AttentionRows(step.page_table, step.row_sequence, step.positions)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _padding(num_rows: int, num_pages: int) -> StepInput:
    """A step of nothing but padding, one sequence a row."""
    return StepInput(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.full((num_rows,), -1, dtype=torch.int32),
        slots=torch.full((num_rows,), -1, dtype=torch.int64),
        page_table=torch.zeros(num_rows, num_pages, dtype=torch.int32),
        row_sequence=torch.arange(num_rows, dtype=torch.int32),
        logit_rows=torch.arange(num_rows, dtype=torch.int64),
    )


def _fill(target: StepInput, step: StepInput) -> None:
    """Copy a step into the buffers' first rows; the others become padding again.

    Rows stand in the order of their sequences and the wanted logits in that of the rows, as the buffers have both from the start.
    """
    num_rows, num_pages = step.page_table.shape
    for buffer, numbers, padding in (
        (target.token_ids, step.token_ids, 0),
        (target.positions, step.positions, -1),
        (target.slots, step.slots, -1),
    ):
        buffer[num_rows:] = padding
        buffer[:num_rows].copy_(numbers, non_blocking=True)
    target.page_table[:num_rows, :num_pages].copy_(step.page_table, non_blocking=True)
