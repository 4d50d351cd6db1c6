"""Pool and index against a model of what they should do: 10^5 random operations, invariants all along."""

import random

import pytest

from protocol.ids import TenantId
from worker.cache.namespace import Namespace, NamespaceFields, NamespaceRing
from worker.cache.page_cache import Lease, PageCache

PAGE = 4
SPACES = [Namespace(bytes([i]) * 32) for i in range(3)]


class _Holder:
    """A sequence reduced to what the cache sees of it."""

    def __init__(self, space: Namespace, tokens: list[int]) -> None:
        self.space, self.tokens = space, tokens
        self.leases: list[Lease] = []
        self.digests: list[bytes] = []

    def publish(self, cache: PageCache) -> None:
        for depth in range(len(self.digests), len(self.leases)):
            tokens = self.tokens[depth * PAGE : (depth + 1) * PAGE]
            parent = self.digests[depth - 1] if depth else self.space.root
            self.digests.append(self.space.chain(parent, tokens))
            cache.publish(parent, self.digests[-1], self.leases[depth], tokens, depth)


def _step(cache: PageCache, holders: list[_Holder], content: dict, rng: random.Random) -> None:
    """One random operation; `content` remembers what each page was filled with in its present life."""
    action = rng.random()
    if action < 0.45 or not holders:
        space = rng.choice(SPACES)
        tokens = [rng.randrange(2) for _ in range(PAGE * rng.randrange(1, 6))] + [9]
        holder = _Holder(space, tokens)
        holder.leases, holder.digests = cache.match(space, tokens)
        for depth, lease in enumerate(holder.leases):
            # A hit leads to a page that was filled for this namespace and exactly this prefix.
            assert content[lease.page, lease.tag] == (space.key, tokens[: (depth + 1) * PAGE])
        missing = len(tokens) // PAGE - len(holder.leases)
        fresh = cache.allocate(space, missing)
        if fresh is None:
            cache.release(reversed(holder.leases))
            return
        for depth, lease in enumerate(fresh, start=len(holder.leases)):
            content[lease.page, lease.tag] = (space.key, tokens[: (depth + 1) * PAGE])
        holder.leases = [*holder.leases, *fresh]
        holders.append(holder)
    elif action < 0.7:
        rng.choice(holders).publish(cache)
    elif action < 0.97:
        holder = holders.pop(rng.randrange(len(holders)))
        cache.release(reversed(holder.leases))
    else:
        holder = rng.choice(holders)
        cache.quarantine(rng.sample(holder.leases, 1))
        for page in cache.pool.quarantined():
            cache.pool.restore(page)


@pytest.mark.parametrize("num_pages", [6, 40])
def test_random_operations_keep_the_invariants(num_pages: int) -> None:
    """50,000 operations on a pool that is always short, and on one that isn't."""
    rng = random.Random(num_pages)
    cache, holders, content = PageCache(num_pages, PAGE), [], {}
    for number in range(50_000):
        _step(cache, holders, content, rng)
        if number % 50 == 0:
            cache.check_invariants()
        for holder in holders[:2]:
            for lease in holder.leases:
                assert int(cache.pool.tags[lease.page]) in (lease.tag, 0)  # 0: in quarantine
    for holder in holders:
        cache.release(reversed(holder.leases))
    for page in cache.pool.quarantined():
        assert cache.pool.restore(page)
    cache.check_invariants()
    assert 0 == cache.pool.num_held
    assert num_pages == cache.num_available()


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
