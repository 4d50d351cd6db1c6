"""Pool and index against a model of what they should do, invariants after each operation; digests that collide; namespaces."""

import random
from dataclasses import dataclass, field

import pytest

from protocol.ids import TenantId
from worker.cache.namespace import Namespace, NamespaceFields, NamespaceRing
from worker.cache.page_cache import Lease, PageCache

PAGE = 4
NUM_OPERATIONS = 50_000
SPACES = [Namespace(bytes([i]) * 32, f"tenant{i}") for i in range(3)]

Prefix = tuple[str, tuple[int, ...]]


@dataclass
class _Node:
    page: int
    last_used: int


@dataclass
class _Model:
    """What the cache promises, written down plainly: sets and counts, and a search through all nodes for what to evict."""

    num_free: int
    nodes: dict[Prefix, _Node] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    whole: dict[int, int] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    clock: int = 0

    def match(self, owner: str, tokens: list[int]) -> list[int]:
        """Pages of the longest known prefix, each retained and marked as used, from the first on."""
        pages = []
        for end in range(PAGE, len(tokens), PAGE):
            node = self.nodes.get((owner, tuple(tokens[:end])))
            if node is None:
                break
            self._use(node)
            self.holders[node.page] = self.holders.get(node.page, 0) + 1
            pages.append(node.page)
        return pages

    def make_room(self, count: int) -> bool:
        """Evict the least recently used prefix that nobody holds and none goes on from, until `count` pages are free."""
        while self.num_free < count:
            idle = [prefix for prefix in self.nodes if not self._is_held(prefix) and not self._goes_on(prefix)]
            if not idle:
                return False
            self._drop(min(idle, key=lambda prefix: self.nodes[prefix].last_used))
        return True

    def take(self, page: int, owner: str) -> None:
        self.num_free -= 1
        self.holders[page], self.owners[page] = 1, owner

    def publish(self, owner: str, prefix: list[int], page: int) -> None:
        """Known once; only below a known one; never from quarantine."""
        key, above = (owner, tuple(prefix)), (owner, tuple(prefix[:-PAGE]))
        if page not in self.quarantined and key not in self.nodes and (above in self.nodes or not above[1]):
            self.nodes[key] = _Node(page, 0)
            self._use(self.nodes[key])

    def release(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page] and page not in self.quarantined and not self._is_indexed(page):
            self._free(page)

    def quarantine(self, page: int) -> None:
        """The page's prefix and all that go on from it are forgotten."""
        for prefix in [prefix for prefix, node in self.nodes.items() if node.page == page]:
            for below in sorted(self.nodes, key=lambda one: -len(one[1])):
                if below[0] == prefix[0] and below[1][: len(prefix[1])] == prefix[1]:
                    self._drop(below)
        if page not in self.quarantined and not self.holders.get(page):
            self.num_free -= 1
        self.quarantined.add(page)
        self.whole.pop(page, None)

    def restore(self, page: int) -> bool:
        if self.holders.get(page):
            return False
        self.quarantined.remove(page)
        self.owners[page] = ""
        self._free(page)
        return True

    def _use(self, node: _Node) -> None:
        self.clock += 1
        node.last_used = self.clock

    def _is_indexed(self, page: int) -> bool:
        return any(node.page == page for node in self.nodes.values())

    def _is_held(self, prefix: Prefix) -> bool:
        return self.holders.get(self.nodes[prefix].page, 0) > 0

    def _goes_on(self, prefix: Prefix) -> bool:
        return any(
            one != prefix and one[0] == prefix[0] and one[1][: len(prefix[1])] == prefix[1] for one in self.nodes
        )

    def _drop(self, prefix: Prefix) -> None:
        page = self.nodes.pop(prefix).page
        if not self.holders.get(page) and page not in self.quarantined:
            self._free(page)

    def _free(self, page: int) -> None:
        self.num_free += 1
        self.whole.pop(page, None)


class _Holder:
    """A sequence reduced to what the cache sees of it."""

    def __init__(self, space: Namespace, tokens: list[int]) -> None:
        self.space, self.tokens = space, tokens
        self.leases: list[Lease] = []
        self.digests: list[bytes] = []

    def publish(self, cache: PageCache, model: _Model | None = None) -> None:
        for depth in range(len(self.digests), len(self.leases)):
            tokens = self.tokens[depth * PAGE : (depth + 1) * PAGE]
            parent = self.digests[depth - 1] if depth else self.space.root
            self.digests.append(self.space.chain(parent, tokens))
            cache.publish(parent, self.digests[-1], self.leases[depth], tokens, depth)
            if model is not None:
                model.publish(self.space.owner, self.tokens[: (depth + 1) * PAGE], self.leases[depth].page)


class _Pair:
    """The cache and its model, given the same operations."""

    def __init__(self, num_pages: int) -> None:
        self.rng = random.Random(num_pages)
        self.cache, self.model = PageCache(num_pages, PAGE), _Model(num_pages)
        self.holders: list[_Holder] = []
        self.counts = dict.fromkeys(
            ("begin", "refused", "hit", "publish", "end", "quarantine", "restore", "whole", "forget"), 0
        )

    def step(self) -> None:
        """One random operation on both."""
        chance = self.rng.random()
        if chance < 0.42:
            self._begin()
        elif not self.holders:
            self._restore()
        elif chance < 0.66:
            self.rng.choice(self.holders).publish(self.cache, self.model)
            self.counts["publish"] += 1
        elif chance < 0.93:
            self._end(self.holders.pop(self.rng.randrange(len(self.holders))))
        elif chance < 0.96:
            self._complete(self.rng.choice(self.rng.choice(self.holders).leases))
        elif chance < 0.98:
            self._quarantine([self.rng.choice(self.rng.choice(self.holders).leases)])
        elif chance < 0.995:
            self._restore()
        else:
            self._forget(self.rng.choice(SPACES).owner)

    def _begin(self) -> None:
        space = self.rng.choice(SPACES)
        holder = _Holder(space, [self.rng.randrange(2) for _ in range(PAGE * self.rng.randrange(1, 6))] + [9])
        holder.leases, holder.digests = self.cache.match(space, holder.tokens)
        assert self.model.match(space.owner, holder.tokens) == [lease.page for lease in holder.leases]
        self.counts["hit"] += bool(holder.leases)
        missing = len(holder.tokens) // PAGE - len(holder.leases)
        fresh = self.cache.allocate(space, missing)
        assert self.model.make_room(missing) == (fresh is not None)
        if fresh is None:
            self.counts["refused"] += 1
            return self._end(holder)
        for lease in fresh:
            self.model.take(lease.page, space.owner)
        holder.leases = [*holder.leases, *fresh]
        self.holders.append(holder)
        self.counts["begin"] += 1
        return None

    def _end(self, holder: _Holder) -> None:
        self.cache.release(reversed(holder.leases))
        for lease in reversed(holder.leases):
            self.model.release(lease.page)
        self.counts["end"] += 1

    def _complete(self, lease: Lease) -> None:
        if not self.cache.pool.is_quarantined(lease.page):
            key = self.rng.randrange(1, 1000)
            self.cache.pool.set_whole(lease.page, key)
            self.model.whole[lease.page] = key
            self.counts["whole"] += 1

    def _quarantine(self, leases: list[Lease]) -> None:
        self.cache.quarantine(leases)
        for lease in leases:
            self.model.quarantine(lease.page)
        self.counts["quarantine"] += 1

    def _restore(self) -> None:
        assert sorted(self.model.quarantined) == list(self.cache.pool.quarantined())
        for page in self.cache.pool.quarantined():
            is_free = self.cache.pool.restore(page)
            assert self.model.restore(page) == is_free
            self.counts["restore"] += is_free

    def _forget(self, owner: str) -> None:
        """A deleted tenant: its sequences end, its pages are quarantined, held or not."""
        for holder in [holder for holder in self.holders if holder.space.owner == owner]:
            self.holders.remove(holder)
            self._end(holder)
        pages = self.cache.pool.pages_of(owner)
        assert sorted(page for page, name in self.model.owners.items() if name == owner) == pages
        self._quarantine([Lease(page, 0) for page in pages])
        self.counts["forget"] += 1

    def compare(self) -> None:
        """Both in the same state, and the cache's own invariants."""
        pool, model = self.cache.pool, self.model
        self.cache.check_invariants()
        assert (model.num_free, len(model.nodes), len(model.quarantined)) == (
            pool.num_free,
            len(self.cache.index),
            pool.num_quarantined,
        )
        assert sum(not model.holders.get(node.page) for node in model.nodes.values()) == pool.num_cached
        assert model.whole == pool.whole_pages()
        for holder in self.holders[:2]:
            for lease in holder.leases:
                assert int(pool.tags[lease.page]) in (lease.tag, 0)  # 0: in quarantine


@pytest.mark.parametrize("num_pages", [6, 40])
def test_random_operations_do_what_the_model_does(num_pages: int) -> None:
    """10^5 operations on a pool that is always short and on one that isn't, compared and checked after each."""
    pair = _Pair(num_pages)
    for _ in range(NUM_OPERATIONS):
        pair.step()
        pair.compare()
    assert all(count > NUM_OPERATIONS // 1000 for count in pair.counts.values()), pair.counts
    while pair.holders:
        pair._end(pair.holders.pop())
    pair._restore()
    pair.compare()
    assert 0 == pair.cache.pool.num_held
    assert num_pages == pair.cache.num_available()


def test_offers_do_not_pile_up() -> None:
    """Matching and releasing the same prefix for ever doesn't grow the index."""
    cache = PageCache(8, PAGE)
    holder = _Holder(SPACES[0], [1] * (PAGE * 3) + [2])
    holder.leases = cache.allocate(holder.space, 3)
    holder.publish(cache)
    cache.release(reversed(holder.leases))
    for _ in range(5000):
        leases, _ = cache.match(holder.space, holder.tokens)
        assert 3 == len(leases)
        cache.release(reversed(leases))
    assert len(cache.index._evictable) < 200


def test_a_match_leaves_a_token_to_compute() -> None:
    """A prompt that is cached as a whole still has its last page computed."""
    cache = PageCache(8, PAGE)
    holder = _Holder(SPACES[0], [1] * (PAGE * 2))
    holder.leases = cache.allocate(holder.space, 2)
    holder.publish(cache)
    assert 1 == len(cache.match(holder.space, [1] * (PAGE * 2))[0])
    assert 2 == len(cache.match(holder.space, [1] * (PAGE * 2 + 1))[0])


def test_colliding_digests_are_misses() -> None:
    """With digests of 8 bits everything collides, and still no hit is wrong: tokens are compared."""

    class Short(Namespace):
        def chain(self, parent: bytes, tokens) -> bytes:
            return super().chain(parent, tokens)[:1]

    cache, space, rng, known = PageCache(600, PAGE), Short(b"k" * 32), random.Random(3), {}
    for _ in range(400):
        tokens = [rng.randrange(1000) for _ in range(PAGE)] + [0]
        leases, _ = cache.match(space, tokens)
        for lease in leases:
            assert known[lease.page] == tokens[:PAGE]
        if not leases:
            fresh = cache.allocate(space, 1)
            known[fresh[0].page] = tokens[:PAGE]
            cache.publish(space.root, space.chain(space.root, tokens[:PAGE]), fresh[0], tokens[:PAGE], 0)
    cache.check_invariants()


def test_the_encoding_of_namespaces_is_injective() -> None:
    """Fields can't run into each other, and absent is not empty."""
    values = [None, "", "a", "aa", "\x00", "\x01", "a\x00"]
    seen = set()
    for tenant in ("a", "aa", "a\x01"):
        for salt in values:
            for group in values:
                for adapter in values:
                    fields = NamespaceFields(TenantId(tenant), "m", "kv", salt, group, adapter)
                    seen.add(fields.encode())
    assert 3 * len(values) ** 3 == len(seen)


def test_namespaces_depend_on_all_their_fields() -> None:
    """Tenant, salt, model, KV format and secret each make another key; the same fields the same one."""
    base = NamespaceRing(b"s" * 32, "model", "bf16")
    keys = {
        base.namespace(TenantId("a"), None).key,
        base.namespace(TenantId("b"), None).key,
        base.namespace(TenantId("a"), "salt").key,
        base.namespace(TenantId("a"), "").key,
        NamespaceRing(b"s" * 32, "other", "bf16").namespace(TenantId("a"), None).key,
        NamespaceRing(b"s" * 32, "model", "fp8").namespace(TenantId("a"), None).key,
        NamespaceRing(b"t" * 32, "model", "bf16").namespace(TenantId("a"), None).key,
    }
    assert 7 == len(keys)
    assert (
        base.namespace(TenantId("a"), None).key
        == NamespaceRing(b"s" * 32, "model", "bf16").namespace(TenantId("a"), None).key
    )
