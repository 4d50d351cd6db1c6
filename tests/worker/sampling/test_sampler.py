"""Choosing tokens: greedy, drawn, refused."""

import itertools
import math

import numpy as np
import pytest
import torch

from worker.sampling import NotFinite, Sampled, sample

INF = math.inf
LOGITS = (2.0, 1.0, 1.0, 0.5, -INF, 0.0, -1.0, -3.0)


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What each token's probability should be, by sorting and plain sums."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or len(order)]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    total = sum(weights.values())
    sums = itertools.accumulate(weights[token] for token in order)
    keep = sum(reached < top_p * total for reached in sums) + 1
    kept = [token for token in order[:keep] if weights[token] >= min_p]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def test_greedy_takes_the_first_of_equal_maxima(make_row):
    """However many tokens share the maximum, and wherever they are in a long row."""
    logits = torch.zeros(3, 4099)
    logits[0, [17, 3000, 4098]] = 5.0
    logits[1, [4097, 4098]] = 5.0
    actual = sample(logits, [make_row(vocab_size=4099) for _ in range(3)])
    assert [Sampled(17), Sampled(4097), Sampled(0)] == actual


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 9e-6, 1e-5, 1.1e-5, 1e-3])
@pytest.mark.parametrize("high", [3e38, 12.0])
def test_a_very_small_temperature_is_greedy_and_overflows_nowhere(make_row, temperature, high):
    """Not even with logits at the ends of float32."""
    logits = torch.tensor([[-3e38, high - 1.0 if high < 1e3 else 1e38, high, -INF]])
    rows = [make_row(temperature=temperature, seed=seed, vocab_size=4, top_p=0.9) for seed in range(20)]
    assert [Sampled(2)] * 20 == sample(logits.expand(20, 4), rows)


def test_top_k_of_one_is_greedy(make_row):
    """At any temperature, and with the first of equal maxima."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert [Sampled(1)] == sample(logits, [make_row(temperature=2.0, top_k=1, vocab_size=4)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["one_nan", "last_nan", "one_inf", "nan_and_inf", "all_nan", "all_minus_inf"])
def test_a_row_that_is_not_finite_is_refused_and_its_neighbours_are_not(make_row, temperature, bad):
    """NaN or infinity anywhere, or nothing finite, concerns that row alone."""
    logits = torch.randn(3, 1031, generator=torch.Generator().manual_seed(1))
    rows = [make_row(temperature=temperature, vocab_size=1031, logprobs=3, index=index) for index in range(3)]
    healthy = sample(logits, rows)
    if bad == "one_nan":
        logits[1, 500] = math.nan
    elif bad == "last_nan":
        logits[1, 1030] = math.nan
    elif bad == "one_inf":
        logits[1, 0] = INF
    elif bad == "nan_and_inf":
        logits[1, 3], logits[1, 900] = INF, math.nan
    else:
        logits[1] = math.nan if bad == "all_nan" else -INF
    assert [healthy[0], NotFinite(), healthy[2]] == sample(logits, rows)


def test_minus_infinity_is_a_mask_and_never_drawn(make_row):
    """Even where hardly anything else is there to draw."""
    logits = torch.full((200, 700), -INF)
    logits[:, 300] = -5.0
    logits[:, 650] = -6.0
    rows = [make_row(temperature=2.0, seed=seed, vocab_size=700) for seed in range(200)]
    assert {300, 650} == {result.token_id for result in sample(logits, rows)}


def test_no_rows_give_no_results():
    """A step may have prompts only."""
    assert sample(torch.empty(0, 8), []) == []


def test_the_logits_are_left_as_they_were(make_row):
    """Penalties, masks and temperature work on copies."""
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    row = make_row(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=1.0, logit_bias=((3, 5.0),), min_tokens=5,
        eos=frozenset({1}), output=(2, 3), top_p=0.9, top_k=5, min_p=0.01, logprobs=2,
    )  # fmt: skip
    sample(logits, [row])
    assert torch.equal(before, logits)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.95, "min_p": 0.4},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_probability_says(make_row, filters):
    """Chi-square over 4000 seeds; what the filters drop never comes."""
    num = 4000
    rows = [make_row(seed=seed, **{"temperature": 1.0, **filters}) for seed in range(num)]
    results = sample(torch.tensor(LOGITS).expand(num, 8), rows)
    counts = np.bincount([result.token_id for result in results], minlength=8)
    expected = num * np.array(probabilities(LOGITS, **filters))
    possible = expected > 0
    assert [token for token in range(8) if counts[token] and not possible[token]] == []
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < 24.3  # exceeded once in a thousand at 7 degrees of freedom


def test_filters_on_a_large_vocabulary_keep_what_sorting_keeps(make_row):
    """Drawn often enough from a flat row, exactly the tokens of the oracle appear."""
    logits = torch.randn(1031, generator=torch.Generator().manual_seed(3)) * 3
    for filters in ({"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 40, "top_p": 0.6}):
        wanted = {token for token, p in enumerate(probabilities(logits.tolist(), **filters)) if p}
        rows = [make_row(temperature=1.0, seed=seed, vocab_size=1031, **filters) for seed in range(1500)]
        results = sample(logits.expand(1500, 1031), rows)
        assert wanted == {result.token_id for result in results}


def test_samples_of_one_request_differ_and_repeat(make_row):
    """The same seed with another sample index is other randomness; the same index gives the same tokens."""

    def tokens(index):
        row = make_row(temperature=1.0, seed=42, index=index, vocab_size=1000)
        chosen = []
        for _ in range(10):
            result = sample(torch.zeros(1, 1000), [row])[0]
            row.observe(result.token_id)
            chosen.append(result.token_id)
        return chosen

    assert len(set(tokens(0))) == 10
    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)
