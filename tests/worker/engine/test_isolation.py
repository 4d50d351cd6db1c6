"""What a tenant could learn of another's prompts: nothing. And its own prompts are found, since "no hit" alone passes with a broken cache.

Each probe: one tenant asks a prompt, another asks the same and one that nobody asked, the first asks its own again. Compared are the pages, the tokens computed,
the steps, and the CPU time to the first token, whose distributions are tested with Kolmogorov and Smirnov's two-sample test.

ISOLATION_MODEL names a model instead of a small random one (`make probes` takes the default model), ISOLATION_PROBES says how many.
"""

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kernels.backend import resolve
from protocol.replies import Delta
from sluicegate.model_store import resolve as find_model
from worker.cache.namespace import Namespace, NamespaceRing
from worker.cache.page_cache import Lease
from worker.engine import Engine
from worker.model.load import load_model

NUM_PROBES = int(os.environ.get("ISOLATION_PROBES", "200"))
NUM_PAGES = 512
PROMPT_TOKENS = 120
SHARED_TOKENS = PROMPT_TOKENS // 16 * 16
WARM_UP = 10
# Of a truth as of a coin: one run in 10,000 would fail for nothing. A hit is seen with a probability beyond this by far.
ALARM = 1e-4
CERTAIN = 1e-12

pytestmark = pytest.mark.timeout(max(120, 6 * NUM_PROBES))


def kolmogorov_smirnov(first: list[float], second: list[float]) -> float:
    """How probable two samples at least as different as these are, if they come from one distribution (asymptotic p-value)."""
    values = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    counts, farthest = [0, 0], 0.0
    for place, (value, which) in enumerate(values):
        counts[which] += 1
        if place + 1 == len(values) or values[place + 1][0] != value:
            farthest = max(farthest, abs(counts[0] / len(first) - counts[1] / len(second)))
    scaled = farthest * math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    if scaled < 0.2:
        return 1.0
    return max(0.0, min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))))


def test_the_test_of_distributions() -> None:
    """Against its published critical values: 1.358 sqrt(2 / n) for 5%, 1.628 for 1%."""
    ranks = [float(rank) for rank in range(200)]
    assert 1.0 == kolmogorov_smirnov(ranks, ranks)
    for critical, probability in ((1.358, 0.05), (1.628, 0.01)):
        shift = critical * math.sqrt(2 / 200) * 200
        between = (
            kolmogorov_smirnov(ranks, [rank + math.floor(shift) - 0.5 for rank in ranks]),
            kolmogorov_smirnov(ranks, [rank + math.ceil(shift) + 0.5 for rank in ranks]),
        )
        assert between[1] < probability < between[0]
    assert kolmogorov_smirnov(ranks, [rank + 1000 for rank in ranks]) < 1e-80


@pytest.fixture(scope="module")
def probed_lab(request: pytest.FixtureRequest):
    """A lab with a small random model, or the one that the environment names."""
    named = os.environ.get("ISOLATION_MODEL")
    if not named:
        return request.getfixturevalue("small_lab")
    return request.getfixturevalue("lab_of")(load_model(find_model(named)[1], resolve("cpu")))


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to see of one request. A lease is one life of a page: freed ones are given to anybody, empty."""

    cpu_s: float
    num_steps: int
    cached_tokens: int
    leases: tuple[Lease, ...]


@dataclass
class Probes:
    """All that was seen, by who asked what."""

    first: list[Seen] = field(default_factory=list)
    others: list[Seen] = field(default_factory=list)
    unknown: list[Seen] = field(default_factory=list)
    own: list[Seen] = field(default_factory=list)

    def p_value(self, which: str) -> float:
        """Of the times to the first token, beside prompts that nobody had asked."""
        return kolmogorov_smirnov([seen.cpu_s for seen in getattr(self, which)], [seen.cpu_s for seen in self.unknown])


def _ask(lab, engine: Engine, tenant: str, prompt: tuple[int, ...]) -> Seen:
    job = lab.job(prompt, tenant=tenant, max_tokens=2, ignore_eos=True)
    started_s, num_steps = time.process_time(), 0
    engine.submit(job)
    told = None
    while told is None:
        num_steps += 1
        replies = [outgoing.envelope.reply for outgoing in engine.step()]
        told = next((reply for reply in replies if isinstance(reply, Delta)), None)
    cpu_s = time.process_time() - started_s
    (sequence,) = engine.scheduler.running
    leases = tuple(sequence.table.leases)
    while engine.has_work:
        engine.step()
    return Seen(cpu_s, num_steps, told.cached_tokens, leases)


def _probe(lab, num_probes: int) -> Probes:
    engine = lab.engine(kv_tokens=NUM_PAGES * 16, integrity="seal", kv_dtype="fp16")
    vocab_size, rng, probes = len(lab.token_bytes), random.Random(5), Probes()

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS))

    for number in range(WARM_UP + num_probes):
        asked = prompt()
        seen = {"first": _ask(lab, engine, "a", asked)}
        # In turns, so that neither is always the first after the other tenant.
        for which in ("others", "unknown") if number % 2 else ("unknown", "others"):
            seen[which] = _ask(lab, engine, "b", asked if which == "others" else prompt())
        seen["own"] = _ask(lab, engine, "a", asked)
        if number >= WARM_UP:
            for which, one in seen.items():
                getattr(probes, which).append(one)
    return probes


def test_another_tenants_prompt_is_like_one_that_nobody_asked(probed_lab) -> None:
    """No page of it is shared, as many tokens and steps are computed, and the time to the first token says nothing; one's own is found."""
    probes = _probe(probed_lab, NUM_PROBES)
    for first, others, unknown, own in zip(probes.first, probes.others, probes.unknown, probes.own, strict=True):
        assert set() == set(first.leases) & set(others.leases)
        assert (0, 0, 0) == (first.cached_tokens, others.cached_tokens, unknown.cached_tokens)
        assert unknown.num_steps == others.num_steps
        assert SHARED_TOKENS == own.cached_tokens
        assert first.leases[: SHARED_TOKENS // 16] == own.leases[: SHARED_TOKENS // 16]
    same, hit = probes.p_value("others"), probes.p_value("own")
    print(f"{NUM_PROBES} probes: p = {same:.3g} for another tenant's prompts, {hit:.3g} for one's own")
    assert same > ALARM
    assert hit < CERTAIN


def test_the_probes_see_a_leak(probed_lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With namespaces that forget the tenant, the same probes see that the other's prompts are known."""
    honest: Callable[..., Namespace] = NamespaceRing.namespace
    monkeypatch.setattr(NamespaceRing, "namespace", lambda ring, tenant, *others: honest(ring, "everybody", *others))
    probes = _probe(probed_lab, 40)
    assert {SHARED_TOKENS} == {seen.cached_tokens for seen in probes.others}
    assert probes.p_value("others") < CERTAIN
