"""Which tokens the filters keep, and the draw among them, without sorting the vocabulary.

Tokens stay in the order of their ids, and that is the order of the draw: two tokens that swap ranks by a
rounding error then do not change what a random number stands for. Of equal logits the smaller id ranks higher.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Tokens in each strip of the vocabulary, when few of its largest values are wanted.
_STRIP = 64
# Buckets of the nucleus per unit of log probability.
_BUCKETS_PER_NAT = 64.0
# Weights that the draw skips at once before it looks at single ones.
_SECTION = 256


def largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values, ascending; of equal values those with smaller ids are taken."""
    if count >= len(values):
        return np.arange(len(values))
    candidates: Ids = _candidates(values, count)
    chosen = values[candidates]
    lowest = float(np.partition(chosen, len(chosen) - count)[len(chosen) - count])
    is_kept = chosen >= lowest
    surplus = int(np.count_nonzero(is_kept)) - count
    if surplus:
        is_kept[np.flatnonzero(chosen == lowest)[-surplus:]] = False
    return candidates[is_kept]


def _candidates(values: Floats, count: int) -> Ids:
    """Ids, ascending, of at least the `count` largest values and mostly few more.

    The maxima of `count` strips reach the count-th largest maximum, so at least as many values do.
    """
    num_strips = len(values) // _STRIP
    if count > num_strips:
        return np.arange(len(values))
    # A strip is a column, which numpy reduces faster than a row.
    maxima: Floats = values[: num_strips * _STRIP].reshape(_STRIP, num_strips).max(axis=0)
    lowest = float(np.partition(maxima, num_strips - count)[num_strips - count])
    return np.flatnonzero(values >= lowest)


def nucleus(scaled: Wide, top_p: float) -> tuple[Ids, Wide]:
    """The smallest set of likeliest tokens, one at least, whose share of all weight reaches `top_p` in (0, 1).

    `scaled` are log weights, the largest of them 0. Returns places, ascending, and their weights, 0 for a place
    that is outside of the set after all. Top-p sampling after Holtzman et al., 2020.
    """
    weights = np.exp(scaled)
    total = float(weights.sum())
    goal = top_p * total
    # Tokens lighter than this are together lighter than 1 - top_p: the others reach the goal without them.
    places = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    weights = weights[places]
    # Likelier tokens lie in lower buckets: only the bucket in which the sum gets there needs an order.
    ranks = scaled[places]
    ranks *= -_BUCKETS_PER_NAT
    buckets = ranks.astype(np.int32)
    sums = np.cumsum(np.bincount(buckets, weights=weights))
    last = int(np.searchsorted(sums, goal))
    is_kept = buckets < last
    edge = np.flatnonzero(buckets == last)
    if len(edge):
        edge = edge[np.argsort(ranks[edge], kind="stable")]
        reached = (sums[last - 1] if last else 0.0) + np.cumsum(weights[edge])
        is_kept[edge[: int(np.searchsorted(reached, goal)) + 1]] = True
    weights *= is_kept
    return places, weights


def draw(weights: Wide, u: float) -> int:
    """The place at which the running sum of weights first exceeds the share `u`, in [0, 1), of it all.

    A place without weight is never drawn. At least one weight is above 0.
    """
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SECTION)))
    goal = u * float(sums[-1])
    section = int(np.searchsorted(sums, goal, side="right"))
    if section == len(sums):  # u is so near to 1 that the product was rounded up
        return int(np.flatnonzero(weights)[-1])
    first = section * _SECTION
    inner = weights[first : first + _SECTION]
    rest = goal - (float(sums[section - 1]) if section else 0.0)
    place = int(np.searchsorted(np.cumsum(inner), rest, side="right"))
    if place == len(inner):  # the two ways to sum a section differ in their last bit
        place = int(np.flatnonzero(inner)[-1])
    return first + place
