"""Gather and compare on GPUs, through the page table that attention reads there: one program for each sequence."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT

_STEP = 256
_NO_PLACE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _compare(tags, table, expected, found, num_pages, max_pages, STEP: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    first_wrong = tl.full((STEP,), _NO_PLACE, dtype=tl.int32)
    for first in range(0, max_pages, STEP):
        place = first + tl.arange(0, STEP)
        wanted = tl.load(expected + sequence * max_pages + place, mask=place < max_pages, other=0)
        page = tl.load(table + sequence * max_pages + place, mask=place < max_pages, other=0)
        is_inside = (page >= 0) & (page < num_pages)
        # A tag is never 0, so that nothing wanted matches what isn't read.
        tag = tl.load(tags + page.to(tl.int64), mask=is_inside, other=0)
        is_wrong = (wanted != 0) & ((tag != wanted) | ~is_inside)
        first_wrong = tl.minimum(first_wrong, tl.where(is_wrong, place, _NO_PLACE))
    lowest = tl.min(first_wrong, axis=0)
    tl.store(found + sequence, tl.where(lowest == _NO_PLACE, -1, lowest).to(tl.int64))


def lease_check_gpu(tags: torch.Tensor, page_table: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """int64 [num_sequences]: the first place of the table that leads to another tag than expected, or -1; arguments have been checked, there are sequences."""
    num_sequences, max_pages = page_table.shape
    found = torch.empty(num_sequences, dtype=torch.int64, device=tags.device)
    _compare[(num_sequences,)](
        tags, page_table, expected, found, len(tags), max_pages, STEP=_STEP, num_warps=4, **EXACT
    )
    return found
