"""Pool and prefix index together: match, allocate, publish, release.

What a sequence holds stays its own until it releases it. A match retains the pages in the same call that finds them, so a hit
can't be evicted between being found and being used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.cache.held_prefixes import HeldPrefixes
from worker.cache.namespace import Namespace
from worker.cache.page_pool import PageId, PagePool
from worker.cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Lease:
    """A page in a sequence's hands, with the tag it must still have when it's read."""

    page: PageId
    tag: int


class PageCache:
    """The one owner of pages and prefixes."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex()
        self.held = HeldPrefixes()

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[list[Lease], list[bytes]]:
        """The longest known prefix of whole pages that leaves at least one token to compute, retained, with its digests."""
        leases: list[Lease] = []
        digests: list[bytes] = []
        parent, size = namespace.root, self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            page_tokens = tuple(tokens[start : start + size])
            digest = namespace.chain(parent, page_tokens)
            node = self.index.get(digest, parent, page_tokens)
            if node is None:
                break
            self.index.touch(digest)
            leases.append(Lease(node.page, self.pool.retain(node.page)))
            digests.append(digest)
            parent = digest
        return leases, digests

    def num_available(self) -> int:
        """Pages that are free or could be evicted."""
        return self.pool.num_free + self.pool.num_cached

    def allocate(self, namespace: Namespace, count: int) -> list[Lease] | None:
        """`count` pages for one sequence, evicting as needed; None (and nothing taken) if there are not enough."""
        while self.pool.num_free < count:
            if not self._evict_one():
                return None
        return [Lease(*self.pool.allocate(namespace)) for _ in range(count)]

    def publish(
        self,
        parent: bytes,
        digest: bytes,
        lease: Lease,
        tokens: Sequence[int],
        depth: int,
        landmarks: Sequence[bytes] = (),
    ) -> None:
        """Make a held, complete, committed page findable. If the prefix is there already, the page stays private, as does one in quarantine.

        `landmarks` are the digests (protocol.routing) of those that lie in the page.
        """
        if self.pool.is_quarantined(lease.page):
            return
        if self.index.insert(digest, parent, lease.page, tokens, depth, landmarks):
            self.pool.set_indexed(lease.page)
            if landmarks:
                self.held.add(landmarks)

    def release(self, leases: Iterable[Lease]) -> None:
        """Give pages back; indexed ones stay findable until they're evicted."""
        for lease in leases:
            if self.pool.release(lease.page):
                self.index.offer(lease.page)

    def quarantine(self, leases: Iterable[Lease]) -> None:
        """Take pages out of reach: they and every prefix that goes on from them are dropped from the index."""
        for lease in leases:
            for node in self.index.subtree(lease.page):
                self._forget(node.page)
            self.pool.quarantine(lease.page)

    def _forget(self, page: PageId) -> None:
        (node,) = self.index.subtree(page)
        parent = self.index.remove(node)
        self.pool.drop_from_index(page)
        if node.landmarks:
            self.held.remove(node.landmarks)
        if parent is not None:
            self._offer_if_idle(parent.page)

    def _offer_if_idle(self, page: PageId) -> None:
        if not self.pool.is_held(page):
            self.index.offer(page)

    def _evict_one(self) -> bool:
        for node in self.index.evictable():
            if self.pool.is_held(node.page):
                continue  # retained since it was offered; its release offers it again
            self._forget(node.page)
            return True
        return False

    def check_invariants(self) -> None:
        """Pool and index agree."""
        self.pool.check_invariants()
        self.index.check_invariants()
        indexed = {page for page in map(PageId, range(self.pool.num_pages)) if self.pool.is_indexed(page)}
        assert len(indexed) == len(self.index)
