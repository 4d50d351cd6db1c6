"""The input of one forward pass."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepInput:
    """Rows are tokens; those of one sequence are adjacent and ascending in position."""

    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int32 [num_rows]
    slots: torch.Tensor  # int64 [num_rows], page * page_size + offset
    page_table: torch.Tensor  # int32 [num_sequences, max_pages]
    row_sequence: torch.Tensor  # int32 [num_rows]
    logit_rows: torch.Tensor  # int64 [num_logits], rows whose logits are wanted
