"""Which prefix lies on which page: a tree in a flat table, keyed by keyed digests of whole prefixes.

root_a -> c1 (page 4) -> c2 (page 9)        one tree for each namespace; a digest of one namespace cannot occur in
                     \\-> c2' (page 2)       another, since each has its own key
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from worker.cache.page_pool import PageId


@dataclass(slots=True)
class Node:
    """A whole page that ends a known prefix."""

    digest: bytes
    parent: bytes
    page: PageId
    tokens: tuple[int, ...] = field(repr=False)
    depth: int
    landmarks: tuple[bytes, ...] = ()
    children: set[bytes] = field(default_factory=set)
    last_used: int = 0


class PrefixIndex:
    """Insert, find and choose what to evict. Holds no page itself: its owner keeps pool and index in step."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._by_page: dict[PageId, bytes] = {}
        self._evictable: list[tuple[int, int, bytes]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes, parent: bytes, tokens: Sequence[int]) -> Node | None:
        """The node that goes on from `parent` with `tokens`. Both are compared: a colliding digest is a miss.

        Who asks from the root on, node by node, has then compared every token and the namespace, whose root is its own.
        """
        node = self._nodes.get(digest)
        if node is None or node.parent != parent or node.tokens != tuple(tokens):
            return None
        return node

    def at(self, page: PageId) -> Node | None:
        """The node on a page."""
        digest = self._by_page.get(page)
        return None if digest is None else self._nodes[digest]

    def holds(self, node: Node | None) -> bool:
        """Whether this very node is still there: another prefix of a colliding digest may have come in its place."""
        return node is not None and self._nodes.get(node.digest) is node

    def insert(
        self,
        digest: bytes,
        parent: bytes,
        page: PageId,
        tokens: Sequence[int],
        depth: int,
        landmarks: Sequence[bytes] = (),
    ) -> bool:
        """Add a page; False if the digest is known already, or its parent is not (a hole would never be found).

        The caller has seen (`get`, `holds`) that the node of `parent` is the prefix that this page goes on from.
        """
        if digest in self._nodes or (depth > 0 and parent not in self._nodes):
            return False
        self._nodes[digest] = Node(digest, parent, page, tuple(tokens), depth, tuple(landmarks))
        self._by_page[page] = digest
        if depth > 0:
            self._nodes[parent].children.add(digest)
        self.touch(digest)
        return True

    def touch(self, digest: bytes) -> None:
        """Mark as just used."""
        self._clock += 1
        self._nodes[digest].last_used = self._clock

    def offer(self, page: PageId) -> None:
        """Nobody holds the page any more: it may be evicted when it has no children."""
        node = self._nodes[self._by_page[page]]
        heapq.heappush(self._evictable, (node.last_used, -node.depth, node.digest))
        if len(self._evictable) > 4 * len(self._nodes) + 64:
            self._drop_stale()

    def evictable(self) -> Iterator[Node]:
        """Offered nodes without children, least recently used and deepest first. The caller removes the one it takes."""
        while self._evictable:
            offer = heapq.heappop(self._evictable)
            # A node that was used again or has children was, or will be, offered anew when that ends.
            if self._is_fresh(offer):
                yield self._nodes[offer[2]]

    def _drop_stale(self) -> None:
        """Keep the heap from growing with offers that were overtaken by a later use."""
        fresh = {offer for offer in self._evictable if self._is_fresh(offer)}
        self._evictable = sorted(fresh)

    def _is_fresh(self, offer: tuple[int, int, bytes]) -> bool:
        node = self._nodes.get(offer[2])
        return node is not None and node.last_used == offer[0] and not node.children

    def remove(self, node: Node) -> Node | None:
        """Forget a leaf; returns its parent if that has become a leaf."""
        assert not node.children, "a parent is evicted after its children"
        del self._nodes[node.digest]
        del self._by_page[node.page]
        parent = self._nodes.get(node.parent) if node.depth else None
        if parent is None:
            return None
        parent.children.discard(node.digest)
        return None if parent.children else parent

    def subtree(self, page: PageId) -> list[Node]:
        """The node on a page and all below it, leaves first; empty if the page is not indexed."""
        digest = self._by_page.get(page)
        if digest is None:
            return []
        found, pending = [], [self._nodes[digest]]
        while pending:
            node = pending.pop()
            found.append(node)
            pending.extend(self._nodes[child] for child in node.children)
        return found[::-1]

    def check_invariants(self) -> None:
        """Each node is its parent's child, on a page of its own."""
        assert len(self._by_page) == len(self._nodes)
        for digest, node in self._nodes.items():
            assert node.digest == digest
            assert self._by_page[node.page] == digest
            if node.depth:
                assert digest in self._nodes[node.parent].children
            for child in node.children:
                assert self._nodes[child].parent == digest
                assert self._nodes[child].depth == node.depth + 1
