"""Digests of prefixes that collide everywhere give misses, never another prefix's pages: tokens and the way to them are compared."""

import random

import pytest

from worker.cache.namespace import Namespace

PAGE_SIZE = 2


def _prompts() -> list[tuple[int, ...]]:
    """Prompts whose ends are the same after different beginnings, and the other way round."""
    rng = random.Random(7)
    starts, middles, ends = (
        [tuple(rng.randrange(256) for _ in range(length)) for _ in range(5)] for length in (8, 14, 9)
    )
    return [start + middle + end for start in starts for middle in middles[:2] for end in ends[:3]]


@pytest.mark.parametrize("num_bits", [8, 3])
@pytest.mark.parametrize("integrity", ["off", "full"])
def test_answers_are_right(small_lab, result_of, monkeypatch, num_bits, integrity) -> None:
    """Two tenants ask everything twice: to the bit the answers of an empty cache, though hardly a digest is anybody's own."""
    prompts, options = _prompts(), {"max_tokens": 3, "logprobs": 2}
    expected = [
        result_of(small_lab.run(small_lab.engine(page_size=PAGE_SIZE), small_lab.job(prompt, **options))[0])
        for prompt in prompts
    ]
    assert len({str(answer) for answer in expected}) == len(prompts), "each prompt has an answer of its own"
    honest, made = Namespace.chain, set()

    def short(self: Namespace, parent: bytes, tokens) -> bytes:
        digest = honest(self, parent, tokens)
        made.add((self.key, digest))
        return bytes([digest[0] & ((1 << num_bits) - 1)])

    monkeypatch.setattr(Namespace, "chain", short)
    engine = small_lab.engine(
        page_size=PAGE_SIZE, kv_tokens=4096, integrity=integrity, checks_leases=integrity != "off"
    )
    for tenant in ("a", "b"):
        for prompt, answer in zip(prompts, expected, strict=True):
            for _ in range(2):
                (replies,) = small_lab.run(engine, small_lab.job(prompt, tenant=tenant, **options))
                assert answer == result_of(replies)
    assert len(made) > 1 << num_bits, "more prefixes than digests"
    assert (1 << num_bits) // 8 < len(engine.cache.index) <= 1 << num_bits
    assert engine.totals.cached_tokens > 0, "some are found"
    assert 0 == engine.integrity.totals.num_violations
