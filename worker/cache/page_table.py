"""The pages of one sequence, twice: as leases, the record of what it holds, and as arrays, what attention is handed.

The tags beside the page numbers are what the pool must still say when a step reads through the arrays, the keys what the pages' bytes
must be sealed with.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from worker.cache.page_cache import Lease


class PageTable:
    """Grows by leases, is cleared as a whole. The first `num_opened` pages have a key, the first `num_whole` of these are complete."""

    __slots__ = ("_keys", "_pages", "_tags", "leases", "num_opened", "num_whole")

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self._pages: npt.NDArray[np.int32] = np.zeros(8, dtype=np.int32)
        self._tags: npt.NDArray[np.uint64] = np.zeros(8, dtype=np.uint64)
        self._keys: npt.NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        self.num_opened = 0
        self.num_whole = 0

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """Page numbers in the order of the tokens."""
        return self._pages[: len(self.leases)]

    @property
    def tags(self) -> npt.NDArray[np.uint64]:
        """The lease tags expected of those pages."""
        return self._tags[: len(self.leases)]

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """The keys that those pages are sealed with; 0 for one that isn't opened yet."""
        return self._keys[: len(self.leases)]

    def adopt(self, leases: Iterable[Lease], keys: Iterable[int]) -> None:
        """Append whole pages that others have filled."""
        self.extend(leases)
        for key in keys:
            self._keys[self.num_whole] = key
            self.num_whole += 1
        self.num_opened = self.num_whole

    def extend(self, leases: Iterable[Lease]) -> None:
        """Append pages."""
        for lease in leases:
            position = len(self.leases)
            if position == len(self._pages):
                self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
                self._tags = np.concatenate([self._tags, np.zeros_like(self._tags)])
                self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
            self.leases.append(lease)
            self._pages[position] = lease.page
            self._tags[position] = lease.tag

    def clear(self) -> list[Lease]:
        """Empty the table; returns what it held."""
        leases, self.leases = self.leases, []
        self._keys[:] = 0
        self.num_opened = self.num_whole = 0
        return leases
