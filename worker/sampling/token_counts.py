"""Which tokens a sequence holds and how often, in arrays that grow with it: no step walks the whole history."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct tokens in the order of their first appearance. Those of the prompt begin with a count of 0."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt_token_ids))}
        capacity = len(self._places) + _FIRST_CAPACITY
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._counts = np.zeros(capacity, dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens [num_distinct]; a view."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was added [num_distinct]; a view."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Count an output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1
