"""Padded decode steps in fixed buffers, through real kernels in Triton's interpreter: there is no GPU to record a graph on."""

import pytest
import torch

from kernels.backend import Backend
from kernels.embedding import embedding
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.matmul import matmul
from kernels.paged_attention import paged_attention
from kernels.placement import place
from kernels.rotary.gpu import rotary_gpu
from kernels.rotary.ref import rotary_table
from kernels.weights import Int4Weight, Int8Weight
from worker.model.cuda_graphs import DecodeGraphs, step_rows
from worker.model.step import StepInput

GPU = Backend.GPU
HEADS, DIM, HIDDEN, VOCABULARY = 2, 16, 32, 20
PAGE, PAGES = 8, 12


def step_of(positions: list[int], tables: list[list[int]]) -> StepInput:
    """A decode step with one row for each sequence."""
    count = len(positions)
    slots = [
        table[position // PAGE] * PAGE + position % PAGE for position, table in zip(positions, tables, strict=True)
    ]
    return StepInput(
        token_ids=torch.arange(3, 3 + count),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        page_table=torch.tensor(tables, dtype=torch.int32),
        row_sequence=torch.arange(count, dtype=torch.int32),
        logit_rows=torch.arange(count),
    )


class OneLayer:
    """Embedding, attention with rotary embedding, and a head: a decode step in small."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pool = KvPool.allocate(KvLayout(1, PAGES, HEADS, DIM, PAGE, "fp8"), backend=GPU)
        self.pool.k.random_(0, 0x7F)
        self.pool.v.random_(0, 0x7F)
        scale = torch.rand(3 * HIDDEN, 1).half() / 10
        codes = torch.randint(0, 16, (3 * HIDDEN, HIDDEN), dtype=torch.uint8)
        self.qkv = place(Int4Weight.from_codes(codes, scale, -scale, 32), GPU)
        numbers = torch.randint(-128, 128, (VOCABULARY, HIDDEN), dtype=torch.int8)
        self.head = place(Int8Weight.from_codes(numbers, torch.rand(VOCABULARY, 1).half() / 100, None, 32), GPU)
        self.table = rotary_table(torch.rand(DIM // 2), PAGES * PAGE)

    def __call__(self, step: StepInput, rows: AttentionRows) -> torch.Tensor:
        """Logits of all rows."""
        qkv = matmul(embedding(step.token_ids, self.head, backend=GPU), self.qkv, backend=GPU).view(-1, 3, HEADS, DIM)
        q, k, v = qkv.unbind(dim=1)
        for heads in (q, k):
            # Not the public function: on CPU tensors it looks at positions, and refuses those of padding.
            rotary_gpu(heads, step.positions, self.table)
        kv_write(k, v, step.slots, self.pool, 0, backend=GPU)
        attended = paged_attention(q, self.pool, 0, rows, softmax_scale=0.25, backend=GPU)
        return matmul(attended.flatten(1), self.head, backend=GPU)


def test_padding_changes_no_bit_and_no_page():
    """Three rows padded to four, with a page table padded to sixteen, give the logits and the pages of the three."""
    alone, padded = OneLayer(), OneLayer()
    step = step_of([20, 0, 9], [[3, 5, 1], [7, 0, 0], [2, 8, 0]])
    expected = alone(step, step_rows(step).to(torch.device("cpu")))
    graphs = DecodeGraphs(padded, 8, torch.device("cpu"))
    assert torch.equal(expected, graphs.run(step))
    assert torch.equal(alone.pool.k, padded.pool.k)
    assert torch.equal(alone.pool.v, padded.pool.v)


def test_buffers_hold_nothing_of_the_step_before():
    """After a step of four rows, one of three in the same buffers computes and stores its own rows only."""
    alone, used = OneLayer(), OneLayer()
    before, step = (
        step_of([20, 0, 9, 4], [[3, 5, 1], [7, 0, 0], [2, 8, 0], [9, 0, 0]]),
        step_of([21, 1, 10], [[3, 5, 1], [7, 0, 0], [2, 8, 0]]),
    )
    graphs = DecodeGraphs(used, 8, torch.device("cpu"))
    graphs.run(before)
    pages = used.pool.k[:, 9].clone()
    alone(before, step_rows(before).to(torch.device("cpu")))
    expected = alone(step, step_rows(step).to(torch.device("cpu")))
    assert torch.equal(expected, graphs.run(step))
    assert torch.equal(pages, used.pool.k[:, 9])


@pytest.mark.parametrize(
    ("rows", "sequences", "wanted", "expected"),
    [(3, 3, 3, True), (1, 1, 1, True), (4, 3, 3, False), (3, 3, 1, False), (9, 9, 9, False), (8, 8, 8, True)],
)
def test_only_decode_steps_are_taken(rows, sequences, wanted, expected):
    """Prompts, unwanted logits and more rows than there may be go another way."""
    step = StepInput(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int32),
        slots=torch.zeros(rows, dtype=torch.int64),
        page_table=torch.zeros(sequences, 2, dtype=torch.int32),
        row_sequence=torch.zeros(rows, dtype=torch.int32),
        logit_rows=torch.arange(wanted),
    )
    assert expected is DecodeGraphs(OneLayer(), 8, torch.device("cpu")).takes(step)
