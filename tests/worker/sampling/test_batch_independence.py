"""Promise 1 for the sampler: a row's result does not depend on who is sampled with it, when, or where."""

import random

import pytest
import torch

from worker.sampling import sample

VOCAB = 3001  # odd, so that rows begin at every alignment
TRACER = 2999

OPTIONS = [
    {},
    {"logprobs": 0},
    {"logprobs": 20},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 2, "logprobs": 3},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 200, "top_p": 0.95, "min_p": 0.001, "logprobs": 5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.4, "temperature": 0.9},
    {"logit_bias": ((TRACER, 100.0),)},
    {"min_tokens": 50, "stop_token_ids": (3, 4, 5), "temperature": 1.0},
    {"ignore_eos": True, "temperature": 1.0, "index": 3},
]


@pytest.fixture
def batch(make_row):
    """Rows with all-different options and their logits [16, VOCAB]; some share logits."""
    logits = torch.randn(len(OPTIONS), VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    logits[5] = logits[4]
    logits[11] = logits[10]
    rows = [
        make_row(**{"prompt": (1, 2, 3), "output": (4, 4, 7), "vocab_size": VOCAB, "eos": frozenset({9}), **options})
        for options in OPTIONS
    ]
    return logits, rows


def test_a_row_gets_the_same_result_alone_and_in_any_company(batch):
    """Random orders and subsets, bit for bit, logprobs included."""
    logits, rows = batch
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    chooser = random.Random(0)
    for _ in range(20):
        order = chooser.sample(range(len(rows)), chooser.randint(1, len(rows)))
        assert [alone[i] for i in order] == sample(logits[order], [rows[i] for i in order])


def test_a_bias_stays_with_its_own_row(batch):
    """The tracer token comes out where it was asked for and nowhere else."""
    logits, rows = batch
    results = sample(logits, rows)
    assert [i for i, result in enumerate(results) if result.token_id == TRACER] == [13]


def test_the_place_of_a_row_in_memory_does_not_matter(batch):
    """Rows of a wider tensor, at odd offsets, give the bits of a fresh one."""
    logits, rows = batch
    alone = sample(logits, rows)
    for shift in range(1, 8):
        wide = torch.full((len(rows), VOCAB + 16), float("nan"))
        wide[:, shift : shift + VOCAB] = logits
        assert alone == sample(wide[:, shift : shift + VOCAB], rows)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_rebuilt_from_its_tokens_goes_on_as_if_never_interrupted(make_row, options):
    """After a preemption or on another worker, from prompt and output alone."""
    generator = torch.Generator().manual_seed(9)
    steps = torch.randn(12, VOCAB, generator=generator) * 2
    fields = {"prompt": (1, 2, 3), "vocab_size": VOCAB, "eos": frozenset({9}), **options}
    row = make_row(**fields)
    expected = []
    for step in steps:
        expected += sample(step[None], [row])
        row.observe(expected[-1].token_id)
    for interrupted_at in (0, 1, 5, 11):
        resumed = make_row(output=[result.token_id for result in expected[:interrupted_at]], **fields)
        actual = expected[:interrupted_at]
        for step in steps[interrupted_at:]:
            actual = actual + sample(step[None], [resumed])
            resumed.observe(actual[-1].token_id)
        assert expected == actual
