"""Who holds which physical page.

A page is in exactly one state:

    free --allocate--> held (by one or more sequences) --last release--> free
                          |                                  \\--> cached (if it is indexed) --evict--> free
                          |                                        cached --retain--> held
                          \\--quarantine--> quarantined --restore (after a scrub)--> free

Each allocation starts a new generation of the page with a fresh lease tag; a sequence remembers the tags that it was
given, so a table that points at a page of another life or owner is noticed.
"""

from collections import deque
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

from worker.cache.namespace import Namespace

PageId = NewType("PageId", int)


class PagePool:
    """The pages of one worker. `num_*` counts always add up to `num_pages`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.tags: npt.NDArray[np.uint64] = np.zeros(num_pages, dtype=np.uint64)
        self._generation = [0] * num_pages
        self._holders = [0] * num_pages
        self._indexed = [False] * num_pages
        self._quarantined: set[PageId] = set()
        self._whole: dict[PageId, int] = {}
        self._owners = [""] * num_pages
        self._free: deque[PageId] = deque(PageId(page) for page in range(num_pages))
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix index holds: free on demand."""
        return self._num_cached

    @property
    def num_quarantined(self) -> int:
        """Pages kept from reuse until they are scrubbed."""
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - self.num_free - self.num_cached - self.num_quarantined

    def allocate(self, namespace: Namespace) -> tuple[PageId, int]:
        """Take a free page for one holder; returns it and its lease tag. There must be one."""
        page = self._free.popleft()
        self._generation[page] += 1
        self._holders[page] = 1
        self._owners[page] = namespace.owner
        tag = namespace.lease_tag(page, self._generation[page])
        self.tags[page] = tag
        return page, tag

    def retain(self, page: PageId) -> int:
        """One more holder of a held or cached page; returns its lease tag."""
        assert page not in self._quarantined
        assert self._holders[page] > 0 or self._indexed[page], "a free page cannot be retained"
        if self._holders[page] == 0:
            self._num_cached -= 1
        self._holders[page] += 1
        return int(self.tags[page])

    def release(self, page: PageId) -> bool:
        """One holder less. True if nobody holds it now and it is indexed, so that it may be evicted."""
        assert self._holders[page] > 0, "released more often than retained"
        self._holders[page] -= 1
        if self._holders[page] or page in self._quarantined:
            return False
        if self._indexed[page]:
            self._num_cached += 1
            return True
        self._set_free(page)
        return False

    def generation(self, page: PageId) -> int:
        """Which life of the page this is, counted from 1."""
        return self._generation[page]

    def pages_of(self, owner: str) -> list[PageId]:
        """Pages that may hold bytes of a tenant's: those that were last its own, whatever state they're in."""
        return [PageId(page) for page, name in enumerate(self._owners) if name == owner]

    def set_whole(self, page: PageId, key: int) -> None:
        """A held page is complete, and sealed with this key."""
        assert self._holders[page] > 0
        self._whole[page] = key

    def whole_pages(self) -> dict[PageId, int]:
        """Complete sealed pages, and their keys."""
        return self._whole

    def set_indexed(self, page: PageId) -> None:
        """The prefix index now points at a held page."""
        assert self._holders[page] > 0
        assert not self._indexed[page]
        self._indexed[page] = True

    def drop_from_index(self, page: PageId) -> None:
        """The prefix index no longer points at the page; it becomes free if nobody holds it."""
        assert self._indexed[page]
        self._indexed[page] = False
        if self._holders[page] == 0 and page not in self._quarantined:
            self._num_cached -= 1
            self._set_free(page)

    def quarantine(self, page: PageId) -> None:
        """Keep a page from reuse: its holders may still release it, nobody can get it. It must not be indexed any more."""
        assert not self._indexed[page]
        if self._holders[page] == 0 and page not in self._quarantined:
            self._free.remove(page)
        self._quarantined.add(page)
        self._whole.pop(page, None)
        self.tags[page] = 0

    def restore(self, page: PageId) -> bool:
        """Free a quarantined page after its bytes were scrubbed; False while somebody still holds it."""
        assert page in self._quarantined
        if self._holders[page]:
            return False
        self._quarantined.remove(page)
        self._owners[page] = ""
        self._set_free(page)
        return True

    def quarantined(self) -> Sequence[PageId]:
        """The pages in quarantine."""
        return sorted(self._quarantined)

    def is_held(self, page: PageId) -> bool:
        """Whether a sequence holds the page."""
        return self._holders[page] > 0

    def is_quarantined(self, page: PageId) -> bool:
        """Whether the page is kept from reuse."""
        return page in self._quarantined

    def is_indexed(self, page: PageId) -> bool:
        """Whether the prefix index points at the page."""
        return self._indexed[page]

    def _set_free(self, page: PageId) -> None:
        self.tags[page] = 0
        self._whole.pop(page, None)
        self._free.append(page)

    def check_invariants(self) -> None:
        """Every page is in exactly one state, and the counts say so."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        cached = 0
        for page in map(PageId, range(self.num_pages)):
            held, is_free, quarantined = self._holders[page] > 0, page in free, page in self._quarantined
            assert self._holders[page] >= 0
            assert not (is_free and (held or quarantined or self._indexed[page])), f"page {page} is free and in use"
            is_cached = self._indexed[page] and not held and not quarantined
            cached += is_cached
            assert held or is_free or quarantined or is_cached, f"page {page} is lost"
            assert (int(self.tags[page]) != 0) == (held or is_cached) or quarantined, f"page {page} has a wrong tag"
        assert cached == self._num_cached
        assert not any(page in free or page in self._quarantined for page in self._whole)
