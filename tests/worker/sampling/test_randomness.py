"""The counter-based random numbers."""

import itertools

import numpy as np
import pytest

from worker.sampling.randomness import uniform

KNOWN = [0.2746383669380953, 0.11044027766216435, 0.6234662492891336, 0.6677064462019421]


def test_the_numbers_are_the_same_everywhere():
    """Known answers: a change of the function changes what seeded requests give."""
    numbers = [uniform(0, 0, 0), uniform(42, 1, 7), uniform(2**63 - 1, 127, 10**6), uniform(-1, 0, 0)]
    assert numbers == KNOWN


@pytest.mark.parametrize("varied", ["seed", "index", "position"])
def test_the_numbers_are_uniform_whatever_is_counted(varied):
    """Chi-square over 64 bins, and no trend from one number to the next."""
    counted = {"seed": 5, "index": 2, "position": 9}
    numbers = np.array([uniform(**{**counted, varied: i}) for i in range(20_000)])
    assert 0.0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1.0
    expected = len(numbers) / 64
    counts = np.histogram(numbers, bins=64, range=(0.0, 1.0))[0]
    assert ((counts - expected) ** 2 / expected).sum() < 103.5  # exceeded once in a thousand at 63 degrees
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.025


def test_the_numbers_have_53_random_bits():
    """All multiples of 2**-53 are possible: each bit is set about half of the time."""
    words = [int(uniform(1, 0, position) * 2**53) for position in range(2000)]
    shares = [sum(word >> bit & 1 for word in words) / 2000 for bit in range(53)]
    assert max(abs(share - 0.5) for share in shares) < 0.06


def test_seed_sample_and_position_are_never_confused():
    """Neighbouring counters give different numbers, negative seeds too."""
    keys = list(itertools.product(range(-5, 6), range(6), range(6)))
    assert len(keys) == len({uniform(*key) for key in keys})
