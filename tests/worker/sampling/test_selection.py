"""The filters and the draw against oracles that sort everything."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampling.selection import draw, largest, nucleus

# Few distinct values, so that ties are the rule.
LEVELS = st.sampled_from([-np.inf, -7.5, -3.0, -0.0, 0.0, 0.1, 2.0, 30.0])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(LEVELS, min_size=1, max_size=400), st.integers(1, 500))
def test_the_largest_are_those_that_a_stable_sort_puts_first(values, count):
    """Ties go to the smaller ids, whether or not there are enough values to look at strips."""
    expected = sorted(sorted(range(len(values)), key=lambda i: -values[i])[:count])
    assert expected == largest(np.array(values, dtype=np.float32), count).tolist()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(LEVELS, min_size=1, max_size=400), st.sampled_from([1e-300, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53]))
def test_the_nucleus_is_the_shortest_start_of_the_sorted_tokens_that_is_heavy_enough(logits, top_p):
    """One token less does not reach top_p, up to rounding; ties go to the smaller ids."""
    finite = [-5.0, *logits]
    scaled = np.array(finite) - max(finite)
    places, weights = nucleus(scaled.copy(), top_p)
    kept = places[weights > 0].tolist()
    order = sorted(range(len(finite)), key=lambda i: -finite[i])
    assert sorted(order[: len(kept)]) == kept
    total = np.exp(scaled).sum()
    sums = [0.0, *itertools.accumulate(np.exp(scaled[order]))]
    assert sums[len(kept)] >= top_p * total * (1 - 1e-12)
    assert len(kept) == 1 or sums[len(kept) - 1] < top_p * total * (1 + 1e-12)


def test_the_nucleus_of_equal_weights_counts_exactly():
    """Half of eight equal tokens are the first four."""
    places, weights = nucleus(np.zeros(8), 0.5)
    assert places[weights > 0].tolist() == [0, 1, 2, 3]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 0.25]), min_size=1, max_size=900).filter(any),
    st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_where_the_running_sum_passes_its_share(weights, u):
    """These sums are exact, so the oracle is too."""
    goal = u * sum(weights)
    expected = next((i for i, reached in enumerate(itertools.accumulate(weights)) if reached > goal), None)
    if expected is None:
        expected = max(i for i, weight in enumerate(weights) if weight)
    assert expected == draw(np.array(weights), u)


def test_the_ends_of_the_random_range_draw_tokens_that_have_weight():
    """Zeros around all weights, sums that round, and the largest number below 1."""
    generator = np.random.default_rng(0)
    for size in (1, 255, 256, 257, 5000):
        weights = np.zeros(size + 600)
        weights[300 : 300 + size] = generator.random(size) + 0.001
        assert draw(weights, 0.0) == 300
        assert 299 + size == draw(weights, 1 - 2**-53)


def test_every_draw_from_rounding_weights_has_weight():
    """Goals that lie exactly on the borders of sections stay among the possible."""
    weights = np.random.default_rng(1).random(2000) ** 20
    weights[200:260] = weights[500:530] = 0.0
    sums = np.cumsum(weights)
    for place in range(250, 2000, 7):
        assert weights[draw(weights, min(sums[place] / sums[-1], 1 - 2**-53))] > 0
