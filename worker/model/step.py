"""The input of one forward pass."""

from dataclasses import dataclass

import torch

from kernels.kv_pool import AttentionPlan, AttentionRows, KvLayout
from kernels.seals import SealCheck
from worker.model.config import ModelConfig
from worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class StepInput:
    """Rows are tokens; those of one sequence are adjacent and ascending in position."""

    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int32 [num_rows]
    slots: torch.Tensor  # int64 [num_rows], page * page_size + offset
    page_table: torch.Tensor  # int32 [num_sequences, max_pages]
    row_sequence: torch.Tensor  # int32 [num_rows]
    logit_rows: torch.Tensor  # int64 [num_logits], rows whose logits are wanted
    seal_check: SealCheck | None = None
    plan: AttentionPlan | None = None  # of a step that lies on a GPU

    @property
    def rows(self) -> AttentionRows:
        """What each row attends to."""
        return AttentionRows(self.page_table, self.row_sequence, self.positions, self.plan)

    def check(self, layout: KvLayout, config: ModelConfig) -> None:
        """Raise an error if a row could read or write outside the pool, the vocabulary or the rotary table.

        Ops check their arguments too, but those of a recorded pass only when it is recorded.
        """
        self.rows.check("forward", layout)
        limits = (
            ("token_ids", self.token_ids, 0, config.vocab_size),
            ("positions", self.positions, 0, config.context_length),
            ("slots", self.slots, -1, layout.num_pages * layout.page_size),
            ("logit_rows", self.logit_rows, 0, len(self.token_ids)),
        )
        for name, tensor, first, end in limits:
            numbers = tensor.numpy()
            if len(numbers) and not first <= numbers.min() <= numbers.max() < end:
                raise ModelError(f"forward: {name} must be in [{first}, {end})")
