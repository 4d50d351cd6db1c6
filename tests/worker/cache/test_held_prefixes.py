"""What others are told of the cache: exactly what can be found, in any order of changes."""

import random
import threading

from protocol.ids import TenantId
from protocol.job import Job, SamplingParams
from protocol.routing import RoutingKeys
from worker.cache.held_prefixes import MAX_PREFIXES, MAX_SESSIONS, HeldPrefixes
from worker.cache.namespace import NamespaceRing
from worker.cache.page_cache import PageCache

PAGE = 48  # not a divisor of the landmarks
SPACE = NamespaceRing(b"s" * 32, "model", "bf16").namespace(TenantId("a"), None)


def _apply(told: set[bytes], held: HeldPrefixes, *, is_whole: bool = False) -> None:
    changes = held.take_changes(is_whole=is_whole)
    if changes.is_whole:
        told.clear()
    told.update(changes.added)
    told.difference_update(changes.gone)


def _trail(tokens):
    job = Job("r", "g", "a", "m", tuple(tokens), SamplingParams(max_tokens=1, seed=1), 0, 1)
    return RoutingKeys(b"k" * 32).trail(job)


def _fill(cache: PageCache, tokens: list[int]) -> None:
    """Publish whole pages of these tokens as a sequence would, and let go of them."""
    leases, digests = cache.match(SPACE, [*tokens, 0])
    trail = _trail(tokens)
    for depth in range(len(leases), len(tokens) // PAGE):
        found = cache.allocate(SPACE, 1)
        assert found is not None
        leases += found
        start, end = depth * PAGE, (depth + 1) * PAGE
        parent = digests[-1] if digests else SPACE.root
        digests.append(SPACE.chain(parent, tokens[start:end]))
        cache.publish(parent, digests[-1], leases[-1], tokens[start:end], depth, trail.between(tokens, start, end))
    cache.release(reversed(leases))


def test_told_is_what_can_be_found() -> None:
    """Prompts with common beginnings fill a pool that's too small for them; after each, a landmark is told if and only if it's on a findable page."""
    rng, cache, told, prompts = random.Random(5), PageCache(40, PAGE), set(), []
    for _ in range(60):
        tail = [rng.randrange(100) for _ in range(rng.randrange(600))]
        start = rng.choice(prompts)[: rng.randrange(700)] if prompts else []
        prompts.append((start + tail)[: 30 * PAGE])
        _fill(cache, prompts[-1])
        _apply(told, cache.held)
        expected = set()
        for prompt in prompts:
            leases, _ = cache.match(SPACE, [*prompt, 0])
            expected |= set(_trail(prompt).digests(prompt, len(leases) * PAGE))
            cache.release(reversed(leases))
        assert expected == told
        cache.check_invariants()
    assert told
    cache.quarantine([lease for prompt in prompts for lease in cache.match(SPACE, [*prompt, 0])[0]])
    _apply(told, cache.held)
    assert set() == told


def test_bounded_whatever_is_added() -> None:
    """The last prefixes and sessions are told; nobody taking the changes makes no heap of them."""
    held, told = HeldPrefixes(), set()
    prefixes = [b"%08d" % number for number in range(5 * MAX_PREFIXES)]
    for start in range(0, len(prefixes), 100):
        held.add(prefixes[start : start + 100])
        held.note_session(b"s%07d" % start)
    _apply(told, held, is_whole=True)
    assert {*prefixes[-MAX_PREFIXES:]} == {digest for digest in told if not digest.startswith(b"s")}
    for number in range(2 * MAX_SESSIONS):
        held.note_session(b"t%07d" % number)
        held.note_session(b"kept    ")
    _apply(told, held)
    assert b"kept    " in told
    assert MAX_SESSIONS == len([digest for digest in told if not digest.isdigit()])
    held.remove(prefixes)
    _apply(told, held)
    assert MAX_SESSIONS == len(told)


def test_two_threads_and_one_reader() -> None:
    """Changes are told once, in both threads' order; whoever waits is called when there's something new."""
    held, told, calls = HeldPrefixes(), set(), []
    held.on_change = lambda: calls.append(1)

    def work(name: bytes) -> None:
        for round_number in range(300):
            held.add([name + b"%06d" % round_number])
            if round_number % 3:
                held.remove([name + b"%06d" % round_number])

    threads = [threading.Thread(target=work, args=(name,)) for name in (b"aa", b"bb")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        _apply(told, held)
    for thread in threads:
        thread.join()
    _apply(told, held)
    assert {name + b"%06d" % n for name in (b"aa", b"bb") for n in range(0, 300, 3)} == told
    assert calls
