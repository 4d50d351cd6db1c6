"""From a plan to the tensors of one forward pass, and the check of lease tags that goes before it."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.backend import Backend
from kernels.lease_check import lease_check, leases_hold
from worker.cache.page_pool import PagePool
from worker.executor import prompt_logit_positions
from worker.model.step import StepInput
from worker.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's chunks and their tensors.

    `prompt_rows[i]` counts the logit rows of chunk i that belong to prompt logprobs; they come before the row that samples the
    next token, if the chunk has one. `expected_tags` are shaped like the page table.
    """

    chunks: ListLike[Chunk]
    step: StepInput
    prompt_rows: ListLike[int]
    expected_tags: (
        torch.Tensor
    )  # int64 [num_chunks, max_pages], 0 where the table is padding; contiguous, as the table is
    backend: Backend

    def stale_chunks(self, pool: PagePool) -> list[Chunk]:
        """Chunks whose table leads to a page of another life or owner, read through the table that attention will use, or be sent a copy of."""
        # All of it lies on the CPU.
        if self.backend is not Backend.REF and leases_hold(pool.tags, self.step.page_table, self.expected_tags):
            return []
        tags = torch.from_numpy(pool.tags.view(np.int64))
        backend = Backend.CPU if self.backend is Backend.GPU else self.backend
        found = lease_check(tags, self.step.page_table, self.expected_tags, backend=backend)
        return [chunk for chunk, place in zip(self.chunks, found.tolist(), strict=True) if place >= 0]


def build_batch(chunks: ListLike[Chunk], page_size: int, backend: Backend) -> Batch:
    """Lay out the chunks one after the other; all rows of a sequence are adjacent and ascending."""
    page_table, expected_tags = _page_tables(chunks, page_size)
    rows = _decode_rows(chunks) if all(map(_is_decode, chunks)) else _rows(chunks)
    pages, offsets = np.divmod(rows.positions, page_size)
    step = StepInput(
        token_ids=torch.from_numpy(rows.token_ids),
        positions=torch.from_numpy(rows.positions),
        slots=torch.from_numpy(page_table[rows.sequence, pages].astype(np.int64) * page_size + offsets),
        page_table=torch.from_numpy(page_table),
        row_sequence=torch.from_numpy(rows.sequence),
        logit_rows=torch.from_numpy(rows.logits),
    )
    return Batch(chunks, step, rows.prompt, torch.from_numpy(expected_tags.view(np.int64)), backend)


@dataclass(frozen=True, slots=True)
class _Rows:
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]  # the number of each row's chunk
    logits: npt.NDArray[np.int64]
    prompt: ListLike[int]


def _is_decode(chunk: Chunk) -> bool:
    return chunk.count == 1 and chunk.is_last and not prompt_logit_positions(chunk)


def _decode_rows(chunks: ListLike[Chunk]) -> _Rows:
    """What `_rows` gives where each chunk is one row that samples: most steps, in a fraction of the time."""
    count = len(chunks)
    return _Rows(
        token_ids=np.array([chunk.sequence.tokens[chunk.start] for chunk in chunks], dtype=np.int64),
        positions=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        sequence=np.arange(count, dtype=np.int32),
        logits=np.arange(count, dtype=np.int64),
        prompt=[0] * count,
    )


def _rows(chunks: ListLike[Chunk]) -> _Rows:
    counts = np.array([chunk.count for chunk in chunks])
    logit_rows, prompt_rows = _logit_rows(chunks, np.concatenate([[0], np.cumsum(counts)[:-1]]))
    return _Rows(
        token_ids=np.concatenate([np.array(c.sequence.tokens[c.start : c.start + c.count], np.int64) for c in chunks]),
        positions=np.concatenate([np.arange(c.start, c.start + c.count, dtype=np.int32) for c in chunks]),
        sequence=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
        logits=np.array(logit_rows, dtype=np.int64),
        prompt=prompt_rows,
    )


def _page_tables(chunks: ListLike[Chunk], page_size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    num_pages = [-(-(chunk.start + chunk.count) // page_size) for chunk in chunks]
    page_table = np.zeros((len(chunks), max(num_pages)), dtype=np.int32)
    expected_tags = np.zeros((len(chunks), max(num_pages)), dtype=np.uint64)
    for row, (chunk, count) in enumerate(zip(chunks, num_pages, strict=True)):
        page_table[row, :count] = chunk.sequence.table.pages[:count]
        expected_tags[row, :count] = chunk.sequence.table.tags[:count]
    return page_table, expected_tags


def _logit_rows(chunks: ListLike[Chunk], first_rows: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    rows: list[int] = []
    prompt_rows: list[int] = []
    for chunk, first in zip(chunks, first_rows, strict=True):
        wanted = prompt_logit_positions(chunk)
        rows.extend(int(first) + position - chunk.start for position in wanted)
        prompt_rows.append(len(wanted))
        if chunk.is_last:
            rows.append(int(first) + chunk.count - 1)
    return rows, prompt_rows
