"""Gather and compare, in plain torch."""

import torch


def lease_check_ref(tags: torch.Tensor, page_table: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """int64 [num_sequences]: the first place of the table that leads to another tag than expected, or -1."""
    is_outside = (page_table < 0) | (page_table >= len(tags))
    gathered = tags[page_table.masked_fill(is_outside, 0).long()]
    is_wrong = (is_outside | (gathered != expected)) & (expected != 0)
    first = is_wrong.int().argmax(dim=1) if is_wrong.shape[1] else torch.zeros(len(is_wrong), dtype=torch.int64)
    return torch.where(is_wrong.any(dim=1), first, -1)
