"""Reported logprobs."""

import json
import math

import pytest
import torch

from worker.sampling import prompt_logprobs, sample

INF = math.inf


@pytest.fixture
def logits():
    """Five rows of 999 logits."""
    return torch.randn(5, 999, generator=torch.Generator().manual_seed(2)) * 4


def oracle(row):
    """log-softmax in float64."""
    return torch.log_softmax(row.double(), dim=-1)


def test_logprobs_are_those_of_the_raw_logits(make_row, logits):
    """Penalties, bias, mask, temperature and filters change the choice, not what is reported."""
    row = make_row(
        logprobs=5, temperature=0.3, top_k=3, logit_bias=((7, 100.0),), repetition_penalty=1.5, min_tokens=3,
        eos=frozenset({8}), vocab_size=999,
    )  # fmt: skip
    result = sample(logits[:1], [row])[0]
    assert result.token_id == 7
    expected = oracle(logits[0])
    assert abs(expected[7].item() - result.logprob) < 1e-12
    best = expected.topk(5)
    assert best.indices.tolist() == [token for token, _ in result.top]
    assert max(abs(a - b) for a, (_, b) in zip(best.values.tolist(), result.top, strict=True)) < 1e-12


def test_the_sampled_token_has_its_own_logprob_though_it_is_no_alternative(make_row, logits):
    """The alternatives are the likeliest, the sampled token is not put among them."""
    result = sample(logits[:1], [make_row(logprobs=2, logit_bias=((7, 100.0),), vocab_size=999)])[0]
    assert 7 not in [token for token, _ in result.top]
    assert abs(oracle(logits[0])[7].item() - result.logprob) < 1e-12


def test_zero_alternatives_still_give_the_logprob_and_none_give_nothing(make_row, logits):
    """`logprobs` 0 is not the same as no logprobs."""
    rows = [make_row(logprobs=count, vocab_size=999) for count in (0, None)]
    with_logprob, without = sample(logits[:1].expand(2, 999), rows)
    assert with_logprob.logprob is not None
    assert with_logprob.top == ()
    assert (without.logprob, without.top) == (None, ())


def test_equal_alternatives_are_told_in_the_order_of_their_ids(make_row):
    """Also those of which only some fit."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0, 2.0]])
    result = sample(logits, [make_row(logprobs=5)])[0]
    assert [token for token, _ in result.top] == [1, 3, 6, 2, 4]
    logits = (torch.arange(300) % 3).float()[None]
    result = sample(logits, [make_row(logprobs=150, vocab_size=300)])[0]
    assert [*range(2, 300, 3), *range(1, 150, 3)] == [token for token, _ in result.top]


def test_minus_infinity_is_told_as_a_finite_number(make_row):
    """In alternatives and for the token itself, so that a strict JSON encoder takes it."""
    logits = torch.full((1, 8), -INF)
    logits[0, 2] = 0.5
    result = sample(logits, [make_row(logprobs=20)])[0]
    assert result.logprob == 0.0
    assert result.top[:3] == ((2, 0.0), (0, -9999.0), (1, -9999.0))
    assert len(result.top) == 8
    assert prompt_logprobs(logits, [3], 0) == [(-9999.0, ())]
    json.dumps(result.top, allow_nan=False)


def test_logits_of_any_height_have_logprobs(make_row):
    """The sum does not overflow; what is impossibly unlikely is clamped."""
    logits = torch.tensor([[3e38, 0.0, -3e38, 3e38, 0.0, 0.0, 0.0, 0.0]])
    result = sample(logits, [make_row(logprobs=3)])[0]
    assert math.log(0.5) == result.logprob
    assert ((0, math.log(0.5)), (3, math.log(0.5)), (1, -9999.0)) == result.top


def test_prompt_logprobs_are_those_of_the_next_tokens(logits):
    """Row by row the same numbers that sampling would report."""
    following = [5, 998, 0, 17, 5]
    actual = prompt_logprobs(logits, following, 2)
    for row, token_id, (logprob, top) in zip(logits, following, actual, strict=True):
        expected = oracle(row)
        assert abs(expected[token_id].item() - logprob) < 1e-12
        assert expected.topk(2).indices.tolist() == [token for token, _ in top]


def test_prompt_rows_that_are_not_finite_have_no_alternatives(logits):
    """NaN and infinity get the clamp, their neighbours their numbers."""
    following = [1, 2, 3, 4, 5]
    healthy = prompt_logprobs(logits, following, 3)
    logits[1, 7] = math.nan
    logits[3, 0] = INF
    expected = [healthy[0], (-9999.0, ()), healthy[2], (-9999.0, ()), healthy[4]]
    assert expected == prompt_logprobs(logits, following, 3)
