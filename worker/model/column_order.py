"""Columns in groups: which group each belongs to, where a checkpoint says so column by column (GPTQ's act-order)."""

from dataclasses import dataclass

import torch

from worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class ColumnOrder:
    """How to bring the columns of each group together: `groups` are the scales in their new order, `columns` the matrix' columns in theirs.

    None where nothing moves.
    """

    groups: torch.Tensor | None = None
    columns: torch.Tensor | None = None


def column_order(group_of: torch.Tensor, group_size: int, source: str) -> ColumnOrder:
    """From the group of each column, [K]; every group must have `group_size` columns. Raises ModelError; `source` names the tensor."""
    num_groups = len(group_of) // group_size
    group_of = group_of.long()
    if bool((group_of < 0).any()) or bool((group_of >= num_groups).any()):
        raise ModelError(f"{source} has groups outside 0..{num_groups - 1}")
    counts = torch.bincount(group_of, minlength=num_groups)
    if bool((counts != group_size).any()):
        group = int((counts != group_size).nonzero()[0])
        raise ModelError(f"{source}: group {group} has {int(counts[group])} columns, expected {group_size}")
    by_group = group_of.view(num_groups, group_size)
    first = by_group[:, 0]
    if bool((by_group == first.unsqueeze(1)).all()):  # whole groups lie together, in whichever order
        is_sorted = bool((first == torch.arange(num_groups)).all())
        return ColumnOrder() if is_sorted else ColumnOrder(groups=first)
    return ColumnOrder(columns=torch.argsort(group_of, stable=True))
