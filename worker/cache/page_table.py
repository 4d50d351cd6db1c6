"""The pages of one sequence, twice: as leases, the record of what it holds, and as arrays, what attention is handed.

The tags beside the page numbers are what the pool must still say when a step reads through the arrays.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from worker.cache.page_cache import Lease


class PageTable:
    """Grows by leases, is cleared as a whole."""

    __slots__ = ("_pages", "_tags", "leases")

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self._pages: npt.NDArray[np.int32] = np.zeros(8, dtype=np.int32)
        self._tags: npt.NDArray[np.uint64] = np.zeros(8, dtype=np.uint64)

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

    def extend(self, leases: Iterable[Lease]) -> None:
        """Append pages."""
        for lease in leases:
            position = len(self.leases)
            if position == len(self._pages):
                self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
                self._tags = np.concatenate([self._tags, np.zeros_like(self._tags)])
            self.leases.append(lease)
            self._pages[position] = lease.page
            self._tags[position] = lease.tag

    def clear(self) -> list[Lease]:
        """Empty the table; returns what it held."""
        leases, self.leases = self.leases, []
        return leases
