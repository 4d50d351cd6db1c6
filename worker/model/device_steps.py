"""Forward passes on a GPU: a step goes there in one copy, its logits come back in one, and nobody waits for the device in between.

Decode steps run as recorded graphs, others one op at a time. Steps are checked on the CPU; what is on the device is never looked at.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kernels.kv_pool import KvPool
from worker.model.cuda_graphs import FEWEST_PAGES, DecodeGraphs, DecodePass, power_of_two
from worker.model.step import StepInput
from worker.model.step_memory import StepShape, padding_step, send
from worker.model.workspace import Workspace

USUAL_ROWS = 64  # of a recorded step, unless it's known how many sequences there may be
_LOGITS_AT_ONCE = (
    256  # rows of a pass op by op: those of all of a prompt would take gigabytes, here and in pinned memory
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a pass consists of. `logits` writes to its second argument if there is one."""

    hidden: Callable[[StepInput, KvPool, Workspace], torch.Tensor]  # float32 [num_logits, hidden] of the wanted rows
    logits: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # float32 [rows, hidden] -> [rows, vocab]
    allocate: Callable[[int], Workspace]
    vocab_size: int
    context_length: int


class DeviceSteps:
    """The passes over one pool. Not thread-safe, as their memory is shared."""

    def __init__(self, parts: Parts, pool: KvPool, device: torch.device, max_rows: int = USUAL_ROWS) -> None:
        self.pool = pool
        self._parts = parts
        self._device = device
        self._max_rows = power_of_two(max_rows)
        self._max_pages = min(pool.layout.num_pages, -(-parts.context_length // pool.layout.page_size))
        self._workspace = parts.allocate(0)
        self._graphs = DecodeGraphs(
            _decode(parts, pool, device, self._max_rows), self._max_rows, self._max_pages, device
        )

    def run(self, step: StepInput) -> torch.Tensor:
        """Logits of the wanted rows, float32 [num_logits, vocab] on the CPU; so is the step, which has been checked, with what its seal check found."""
        plan = step.rows.planned()
        if self._graphs.takes(step, plan):
            logits, placed = self._graphs.run(step, plan)
            return self._fetched([logits], step, placed)
        # A width of whole tiles of pages: for others, kernels would be compiled once more.
        shape = StepShape.of(step, plan, -(-step.page_table.shape[1] // FEWEST_PAGES) * FEWEST_PAGES)
        memory = torch.empty(shape.num_bytes, dtype=torch.uint8, device=self._device)
        send(step, plan, shape, memory)
        if self._workspace.num_rows < shape.num_rows:
            self._workspace = self._parts.allocate(shape.num_rows)
        placed = shape.seen_in(memory)
        x = self._parts.hidden(placed, self.pool, self._workspace.first(shape.num_rows))
        return self._fetched((self._parts.logits(rows, None) for rows in torch.split(x, _LOGITS_AT_ONCE)), step, placed)

    def prepare(self, step_tokens: int, *, checks_reads: bool) -> None:
        """Compile kernels, record graphs, and touch the memory of the largest step: with padding, which changes no page.

        Kernels come in variants for few rows and many, so each power of two is tried. Raises torch.OutOfMemoryError.
        """
        num_singles, num_logits = min(self._max_rows, step_tokens) - 1, min(step_tokens, _LOGITS_AT_ONCE)
        largest = padding_step(step_tokens, num_singles, self._max_pages, num_logits=num_logits, has_check=checks_reads)
        self.run(largest)
        for exponent in reversed(range(1, (step_tokens - 1).bit_length())):  # one row is a decode step
            num_rows = 1 << exponent
            few = min(num_rows, _LOGITS_AT_ONCE)
            self.run(padding_step(num_rows, 0, 1, num_logits=few, has_check=checks_reads))
        self._graphs.prepare(checks_reads=checks_reads)
        # Each recording gave back what earlier passes had allocated: here both are there at once, as they will be.
        self.run(largest)

    def _fetched(self, parts: Iterable[torch.Tensor], step: StepInput, placed: StepInput) -> torch.Tensor:
        """Parts of the logits, which are on the device, as one tensor on the CPU; violations too. Waits until everything that was started is done.

        There is one part, or each has at most `_LOGITS_AT_ONCE` rows. More than a few come by way of as much pinned memory as one part takes.
        """
        num_rows, num_sequences = len(step.logit_rows), len(step.page_table)
        violations = self._pinned((num_sequences,), torch.int64)
        is_small = num_rows <= max(_LOGITS_AT_ONCE, self._max_rows)
        staged = self._pinned((num_rows if is_small else _LOGITS_AT_ONCE, self._parts.vocab_size), torch.float32)
        logits = staged if is_small else torch.empty(num_rows, self._parts.vocab_size, dtype=torch.float32)
        first = 0
        for part in parts:
            end = first + len(part)
            if is_small:
                logits[first:end].copy_(part, non_blocking=True)
            else:
                staged[: len(part)].copy_(part, non_blocking=True)
                self._wait()
                logits[first:end] = staged[: len(part)]
            first = end
            del part  # its memory serves the next one
        if placed.seal_check is not None:
            violations.copy_(placed.seal_check.violations[:num_sequences], non_blocking=True)
        self._wait()
        if step.seal_check is not None:
            step.seal_check.note(violations, placed.page_table.shape[1])
        return logits

    def _pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the CPU that a GPU copies to while nobody waits. It goes back to torch's cache when nobody has it any more."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _decode(parts: Parts, pool: KvPool, device: torch.device, max_rows: int) -> DecodePass:
    """What is recorded. It computes in memory of its own, which stays where it is, and holds nothing that holds the graphs."""
    workspace = parts.allocate(max_rows)
    logits = torch.empty(max_rows, parts.vocab_size, dtype=torch.float32, device=device)

    def compute(step: StepInput) -> torch.Tensor:
        num_rows = len(step.token_ids)
        return parts.logits(parts.hidden(step, pool, workspace.first(num_rows)), logits[:num_rows])

    return compute
