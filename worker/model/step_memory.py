"""A step in one piece of memory, so that one copy brings it to a GPU."""

import math
from dataclasses import dataclass

import torch

from kernels.kv_pool import AttentionPlan
from kernels.seals import SealCheck
from worker.model.step import StepInput

# Bytes between the beginnings of numbers: kernels are compiled for addresses that are multiples of 16, and once more for others.
_ALIGNMENT = 64
_PADDING = {"token_ids": 0, "positions": -1, "slots": -1, "row_sequence": 0, "logit_rows": 0}


@dataclass(frozen=True, slots=True)
class StepShape:
    """How much of everything a step has. Steps of one shape lie alike in memory."""

    num_rows: int
    num_sequences: int
    num_pages: int  # the page table's width
    num_logits: int
    num_singles: int  # of the plan
    num_tiles: int
    has_check: bool = False

    @classmethod
    def of(cls, step: StepInput, plan: AttentionPlan, num_pages: int) -> "StepShape":
        """A step's own, but for a page table that is padded to this width."""
        return cls(
            len(step.token_ids), len(step.page_table), num_pages, len(step.logit_rows), len(plan.singles), len(plan.tiles),
            step.seal_check is not None,
        )  # fmt: skip

    @classmethod
    def of_decode(cls, num_rows: int, num_pages: int, *, has_check: bool) -> "StepShape":
        """One row for each sequence, all of whose logits are wanted."""
        return cls(num_rows, num_rows, num_pages, num_rows, num_rows, 0, has_check)

    @property
    def num_bytes(self) -> int:
        """Of memory that holds such a step."""
        return sum(_padded_bytes(dtype, shape) for dtype, shape in self._parts.values())

    @property
    def _parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        table = (self.num_sequences, self.num_pages)
        check: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "page_keys": (torch.int64, table),
            "num_tokens": (torch.int32, (self.num_sequences,)),
            "violations": (torch.int64, (self.num_sequences,)),
        }
        return {
            "token_ids": (torch.int64, (self.num_rows,)),
            "slots": (torch.int64, (self.num_rows,)),
            "logit_rows": (torch.int64, (self.num_logits,)),
            "positions": (torch.int32, (self.num_rows,)),
            "row_sequence": (torch.int32, (self.num_rows,)),
            "singles": (torch.int32, (self.num_singles, 2)),
            "tiles": (torch.int32, (self.num_tiles, 2)),
            "page_table": (torch.int32, table),
            **(check if self.has_check else {}),
        }

    def seen_in(self, memory: torch.Tensor) -> StepInput:
        """The step whose numbers are in the first bytes of `memory`, uint8, wherever that is."""
        found, start = {}, 0
        for name, (dtype, shape) in self._parts.items():
            size = math.prod(shape) * dtype.itemsize
            found[name] = memory[start : start + size].view(dtype).view(shape)
            start += _padded_bytes(dtype, shape)
        check = SealCheck(found["page_keys"], found["num_tokens"], found["violations"]) if self.has_check else None
        return StepInput(
            token_ids=found["token_ids"],
            positions=found["positions"],
            slots=found["slots"],
            page_table=found["page_table"],
            row_sequence=found["row_sequence"],
            logit_rows=found["logit_rows"],
            seal_check=check,
            plan=AttentionPlan(found["singles"], found["tiles"]),
        )


def _padded_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def send(step: StepInput, plan: AttentionPlan, shape: StepShape, memory: torch.Tensor) -> None:
    """Write a step, which lies on the CPU and has been checked, to the first bytes of `memory`; nobody waits for the copy.

    Where the shape is larger than the step there is padding: rows at position -1, which store nothing, see nothing and belong to the
    first sequence.
    """
    # Pinned memory goes back to torch's cache, which doesn't hand it out again before the copy has been made.
    staged = torch.empty(shape.num_bytes, dtype=torch.uint8, pin_memory=memory.is_cuda)
    _fill(shape.seen_in(staged), step, plan)
    memory[: shape.num_bytes].copy_(staged, non_blocking=True)


def _fill(target: StepInput, step: StepInput, plan: AttentionPlan) -> None:
    for name, padding in _PADDING.items():
        numbers, buffer = getattr(step, name), getattr(target, name)
        buffer[: len(numbers)] = numbers
        buffer[len(numbers) :] = padding
    _fill_corner(target.page_table, step.page_table)
    assert (step.seal_check is None) == (target.seal_check is None), "what a pass must verify would get lost"
    if step.seal_check is not None and target.seal_check is not None:
        _fill_corner(target.seal_check.page_keys, step.seal_check.page_keys)
        _fill_corner(target.seal_check.num_tokens[None], step.seal_check.num_tokens[None])
        target.seal_check.violations.zero_()
    assert target.plan is not None
    singles, count = target.plan.singles, len(plan.singles)
    singles[:count] = plan.singles
    singles[count:, 0] = torch.arange(count, len(singles))
    singles[count:, 1] = 1
    target.plan.tiles.copy_(plan.tiles)


def _fill_corner(table: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write to the beginnings of the first rows; zeros to all else."""
    table.zero_()
    table[: numbers.shape[0], : numbers.shape[1]] = numbers


def padding_step(
    num_rows: int, num_singles: int, num_pages: int, *, num_logits: int | None = None, has_check: bool = False
) -> StepInput:
    """Nothing but padding: some sequences of one row, and one of all other rows. Logits of so many rows are wanted, else of all."""
    num_sequences = min(num_singles + 1, num_rows)
    keys = torch.zeros(num_sequences, num_pages, dtype=torch.int64)
    check = SealCheck(
        keys, torch.zeros(num_sequences, dtype=torch.int32), torch.zeros(num_sequences, dtype=torch.int64)
    )
    return StepInput(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.full((num_rows,), -1, dtype=torch.int32),
        slots=torch.full((num_rows,), -1, dtype=torch.int64),
        page_table=keys.int(),
        row_sequence=torch.arange(num_rows, dtype=torch.int32).clamp(max=num_singles),
        logit_rows=torch.arange(num_rows if num_logits is None else num_logits, dtype=torch.int64),
        seal_check=check if has_check else None,
    )
