"""Forward passes of few rows, recorded once for each shape and run again with other inputs.

A decode step computes for a few milliseconds; calling its ops from Python would cost as much again. Passes of more rows compute long enough
to be called one op at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_pool import KvPool
from kernels.recording import Recording
from kernels.seals import SealCheck
from worker.model.step import StepInput
from worker.model.workspace import Workspace

MAX_ROWS = 64
MAX_SHAPES = 128


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A pass of one shape: where its input goes but for the page table, its calls, where its output is."""

    numbers: tuple[npt.NDArray[np.integer], ...]
    recording: Recording
    out: torch.Tensor


Compute = Callable[[StepInput, KvPool, Workspace], torch.Tensor]
Allocate = Callable[[int], Workspace]


class RecordedSteps:
    """The recorded passes over one pool. Not thread-safe, as their memory is shared."""

    def __init__(self, context_length: int, pool: KvPool, compute: Compute, allocate: Allocate) -> None:
        layout = pool.layout
        self.pool = pool
        self._compute = compute
        self._workspace = allocate(MAX_ROWS)
        self._max_pages = min(layout.num_pages, -(-context_length // layout.page_size))
        self._page_table = torch.zeros(MAX_ROWS, self._max_pages, dtype=torch.int32)
        self._check = SealCheck(
            page_keys=torch.zeros(MAX_ROWS, self._max_pages, dtype=torch.int64),
            num_tokens=torch.zeros(MAX_ROWS, dtype=torch.int32),
            violations=torch.zeros(MAX_ROWS, dtype=torch.int64),
        )
        self._table_numbers = self._page_table.numpy()
        self._check_numbers = (
            self._check.page_keys.numpy(), self._check.num_tokens.numpy(), self._check.violations.numpy()
        )  # fmt: skip
        self._recorded: dict[tuple[int, int, bool], RecordedStep] = {}

    def takes(self, step: StepInput) -> bool:
        """Whether the step is small enough."""
        return len(step.token_ids) <= MAX_ROWS and step.page_table.shape[1] <= self._max_pages

    def run(self, step: StepInput) -> torch.Tensor:
        """The normalized last hidden states of the wanted rows, float32 [num_logits, hidden], good until the next call."""
        num_sequences, num_pages = step.page_table.shape
        # By numpy: torch takes several times as long for some bytes.
        self._table_numbers[:num_sequences, :num_pages] = step.page_table.numpy()
        shape = (len(step.token_ids), len(step.logit_rows), step.seal_check is not None)
        recorded = self._recorded.get(shape)
        if recorded is None:
            if len(self._recorded) == MAX_SHAPES:
                self._recorded.pop(next(iter(self._recorded)))
            recorded = self._recorded[shape] = self._record(step)
        for target, numbers in zip(recorded.numbers, _numbers(step), strict=True):
            target[:] = numbers
        if step.seal_check is not None:
            page_keys, num_tokens, violations = self._check_numbers
            page_keys[:num_sequences, :num_pages] = step.seal_check.page_keys.numpy()
            num_tokens[:num_sequences] = step.seal_check.num_tokens.numpy()
            violations[:] = 0
        recorded.recording.run()
        if step.seal_check is not None:
            step.seal_check.note(self._check.violations[:num_sequences], self._max_pages)
        return recorded.out

    def _record(self, step: StepInput) -> RecordedStep:
        target = StepInput(
            step.token_ids.clone(), step.positions.clone(), step.slots.clone(), self._page_table,
            step.row_sequence.clone(), step.logit_rows.clone(), self._check if step.seal_check is not None else None,
        )  # fmt: skip
        recording = Recording()
        with recording.record():
            out = self._compute(target, self.pool, self._workspace.first(len(step.token_ids)))
        return RecordedStep(_numbers(target), recording, out)


def _numbers(step: StepInput) -> tuple[npt.NDArray[np.integer], ...]:
    """All but the page table, as arrays over the same memory."""
    return tuple(
        numbers.numpy() for numbers in (step.token_ids, step.positions, step.slots, step.row_sequence, step.logit_rows)
    )
