"""Penalties, bias, masks and end tokens of one sequence."""

import math

import numpy as np
import pytest
import torch

from worker.sampling import NotFinite, Sampled, sample

INF = math.inf


def adjusted(row, logits):
    """The row's logits after its rules, as a list."""
    return row.adjusted(np.array(logits, dtype=np.float32)).tolist()


def test_presence_penalty_counts_output_tokens_once_and_no_prompt_tokens(make_row):
    """Prompt 1 is free, output 2 and 3 pay, however often."""
    row = make_row(presence_penalty=0.5, prompt=(1, 1), output=(2, 2, 2, 3))
    assert adjusted(row, [1.0] * 8) == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_frequency_penalty_grows_with_each_output_token(make_row):
    """A negative one is a reward."""
    row = make_row(frequency_penalty=0.25, prompt=(1, 1), output=(2, 2, 2, 3))
    assert adjusted(row, [1.0] * 8) == [1.0, 1.0, 0.25, 0.75, 1.0, 1.0, 1.0, 1.0]
    row = make_row(frequency_penalty=-2.0, output=(2, 2))
    assert adjusted(row, [0.0] * 8) == [0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_repetition_penalty_counts_prompt_and_output(make_row):
    """Positive logits are divided, negative ones multiplied, a mask stays a mask."""
    row = make_row(repetition_penalty=2.0, prompt=(0, 1, 4), output=(2, 2))
    logits = [3.0, -3.0, 5.0, 5.0, -INF, 0.0, -1.0, 1.0]
    assert adjusted(row, logits) == [1.5, -6.0, 2.5, 5.0, -INF, 0.0, -1.0, 1.0]


def test_rules_apply_in_their_documented_order(make_row):
    """Repetition, then presence and frequency, then bias, then the mask of min_tokens."""
    row = make_row(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((2, 10.0), (5, 100.0)),
        min_tokens=9, eos=frozenset({5}), prompt=(1,), output=(2, 2),
    )  # fmt: skip
    assert adjusted(row, [4.0] * 8) == [4.0, 2.0, 11.0, 4.0, 4.0, -INF, 4.0, 4.0]


def test_penalties_work_at_temperature_zero(make_row):
    """The second best token is chosen once the best is penalized."""
    logits = torch.tensor([[0.0, 5.0, 4.8, 0.0, 0.0, 0.0, 0.0, 0.0]])
    row = make_row(frequency_penalty=0.5)
    chosen = []
    for _ in range(4):
        chosen.append(sample(logits, [row])[0].token_id)
        row.observe(chosen[-1])
    assert chosen == [1, 2, 1, 2]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40, 10.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_an_extreme_repetition_penalty_still_gives_a_token(make_row, penalty, temperature):
    """Logits saturate instead of becoming infinite; equal ones at the top are ranked by id."""
    row = make_row(repetition_penalty=penalty, temperature=temperature, top_p=0.4, prompt=(1, 2, 3))
    logits = torch.tensor([[9.0, 1.0, 2.0, -1.0, 0.0, -2.0, -2.0, -2.0]])
    assert [Sampled(1 if penalty < 1 else 0)] == sample(logits, [row])


def test_a_row_that_penalties_leave_without_a_finite_logit_is_refused(make_row):
    """Only logits at the end of float32 get there."""
    row = make_row(repetition_penalty=10.0, prompt=tuple(range(8)))
    assert [NotFinite()] == sample(torch.full((1, 8), -3e38), [row])


def test_history_grows_without_losing_counts(make_row):
    """Hundreds of distinct tokens, more than any first size of a table."""
    output = [token for token in range(1000) for _ in range(token % 3)]
    row = make_row(frequency_penalty=1.0, repetition_penalty=1.5, prompt=range(10), output=output, vocab_size=1000)
    expected = [1.0 if token % 3 == 0 and token >= 10 else 2 / 3 - token % 3 for token in range(1000)]
    # 1.0 / 1.5 and the subtraction round in float32.
    assert np.allclose(expected, adjusted(row, [1.0] * 1000), atol=1e-6)


def test_a_later_bias_for_a_token_replaces_an_earlier_one(make_row):
    """A token has one bias."""
    assert adjusted(make_row(logit_bias=((1, 5.0), (1, 2.0)), vocab_size=2), [0.0, 0.0]) == [0.0, 2.0]


def test_biases_and_end_tokens_outside_the_vocabulary_are_ignored(make_row):
    """A model's list of EOS ids may name tokens that it does not have."""
    row = make_row(
        logit_bias=((8, 5.0), (-1, 5.0), (1, 1.0)), eos=frozenset({2, 99}), stop_token_ids=(-3,), min_tokens=1
    )
    assert adjusted(row, [0.0] * 8) == [0.0, 1.0, -INF, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_is_sampled_before_min_tokens(make_row, temperature):
    """All EOS ids and the request's own stop tokens, even if the model wants nothing else."""
    logits = torch.tensor([[50.0, 0.0, 50.0, 0.0, 50.0, 0.0, 0.0, 0.0]])
    row = make_row(
        min_tokens=20, eos=frozenset({0, 2}), stop_token_ids=(4,), temperature=temperature, logit_bias=((2, 100.0),)
    )
    for _ in range(20):
        token_id = sample(logits, [row])[0].token_id
        assert not row.ends_with(token_id)
        row.observe(token_id)
    assert [Sampled(2)] == sample(logits, [row])
    assert row.ends_with(2)


def test_ignored_eos_tokens_are_sampled_like_any_other_and_do_not_end(make_row):
    """Stop tokens of the request still do both, an EOS named there too."""
    row = make_row(min_tokens=2, ignore_eos=True, eos=frozenset({0, 2}), stop_token_ids=(4,))
    logits = torch.tensor([[0.0, 0.0, 5.0, 0.0, 9.0, 0.0, 0.0, 0.0]])
    assert [Sampled(2)] == sample(logits, [row])
    assert [row.ends_with(token_id) for token_id in (0, 2, 4)] == [False, False, True]
    assert make_row(ignore_eos=True, eos=frozenset({2}), stop_token_ids=(2,)).ends_with(2)


def test_min_tokens_wins_over_biases_that_leave_only_end_tokens(make_row):
    """With -100 on all others, one of the others is still the answer."""
    others = tuple((token, -100.0) for token in range(8) if token != 3)
    row = make_row(min_tokens=1, eos=frozenset({3}), logit_bias=others)
    assert [Sampled(0)] == sample(torch.zeros(1, 8), [row])


def test_min_tokens_yields_where_the_model_allows_nothing_else(make_row):
    """A row whose only finite logits are end tokens gives an end token, not an error."""
    row = make_row(min_tokens=5, eos=frozenset({3}), stop_token_ids=(1,))
    logits = torch.full((1, 8), -INF)
    logits[0, [1, 3]] = torch.tensor([1.0, 2.0])
    assert [Sampled(3)] == sample(logits, [row])
