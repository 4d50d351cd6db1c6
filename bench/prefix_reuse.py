"""What a prefix that is cached saves, and what finding it costs. CPU time of all threads, so that a busy machine changes less."""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.integrity import PAGE_SIZE, new_engine
from kernels.backend import resolve
from kernels.kv_pool import KvPool
from protocol.ids import GatewayId, ModelName, RequestId, TenantId
from protocol.job import Job, SamplingParams
from worker.cache.namespace import Namespace
from worker.cache.page_cache import PageCache
from worker.engine import Engine
from worker.model.load import load_model

PROMPT_TOKENS = 2000
CACHED_TOKENS = 1900
POOL_TOKENS = 8192
NUM_PREFIXES = 10_000
NUM_LOOKUPS = 200
GOAL_RATIO, GOAL_SHARE, GOAL_LOOKUP_S = 0.12, 0.01, 1e-3


@dataclass(frozen=True, slots=True)
class Reuse:
    """Medians. `warm_s` is the time to the first token of a prompt whose first CACHED_TOKENS are another's, `ratio` that over `cold_s`, by pairs.

    `lookup_s` is hashing and finding such a prefix, `crowded_s` the same among NUM_PREFIXES others, `crowded_p99_s` the slowest but one of a hundred.
    """

    cold_s: float
    warm_s: float
    ratio: float
    cached_tokens: int
    lookup_s: float
    crowded_s: float
    crowded_p99_s: float
    num_nodes: int


def measure(model: Path, num_turns: int) -> Reuse:
    """Time prompts of a real model in `seal` mode, and lookups in an index of their own."""
    backend = resolve("cpu")
    loaded = load_model(model, backend)
    kv = KvPool.allocate(
        loaded.kv_layout(POOL_TOKENS // PAGE_SIZE, PAGE_SIZE, "fp16"), seal_secret=b"bench" * 6 + b"be"
    )
    engine = new_engine(loaded, kv, backend, "seal")
    colds, warms, ratios, cached = [], [], [], 0
    for turn in range(num_turns + 1):
        random = np.random.default_rng(turn)
        head = _tokens(random, CACHED_TOKENS)
        cold_s, _ = _first_token(engine, f"cold{turn}", head + _tokens(random, PROMPT_TOKENS - CACHED_TOKENS))
        warm_s, cached = _first_token(engine, f"warm{turn}", head + _tokens(random, PROMPT_TOKENS - CACHED_TOKENS))
        if turn:  # the first pair warms up
            colds.append(cold_s)
            warms.append(warm_s)
            ratios.append(warm_s / cold_s)
    alone, _ = lookups(0)
    crowded, num_nodes = lookups(NUM_PREFIXES)
    return Reuse(
        statistics.median(colds), statistics.median(warms), statistics.median(ratios), cached, statistics.median(alone),
        statistics.median(crowded), statistics.quantiles(crowded, n=100)[-1], num_nodes,
    )  # fmt: skip


def lookups(num_prefixes: int) -> tuple[list[float], int]:
    """Seconds of lookups of a prompt whose first CACHED_TOKENS are known beside `num_prefixes` others, and how many pages are known."""
    space, random = Namespace(b"k" * 32, "t"), np.random.default_rng(1)
    cache = PageCache(3 * num_prefixes + 1000, PAGE_SIZE)
    heads = [_tokens(random, 4 * PAGE_SIZE) for _ in range(100)]
    for number in range(num_prefixes):
        _learn(cache, space, heads[number % len(heads)] + _tokens(random, 2 * PAGE_SIZE))
    prompt = _tokens(random, PROMPT_TOKENS)
    _learn(cache, space, prompt[: CACHED_TOKENS // PAGE_SIZE * PAGE_SIZE])
    seconds = []
    for _ in range(NUM_LOOKUPS):
        started_s = time.thread_time()
        leases, _ = cache.match(space, prompt)
        seconds.append(time.thread_time() - started_s)
        assert len(leases) == CACHED_TOKENS // PAGE_SIZE
        cache.release(reversed(leases))
    return seconds, len(cache.index)


def _learn(cache: PageCache, space: Namespace, tokens: tuple[int, ...]) -> None:
    """Make a prefix of whole pages known."""
    leases, digests = cache.match(space, (*tokens, 0))
    fresh = cache.allocate(space, len(tokens) // PAGE_SIZE - len(leases))
    assert fresh is not None
    parent = digests[-1] if digests else space.root
    for depth, lease in enumerate(fresh, start=len(leases)):
        page = tokens[depth * PAGE_SIZE : (depth + 1) * PAGE_SIZE]
        digest = space.chain(parent, page)
        cache.publish(parent, digest, lease, page, depth)
        parent = digest
    cache.release(reversed([*leases, *fresh]))


def _tokens(random: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in random.integers(100, 40_000, count))


def _first_token(engine: Engine, name: str, tokens: tuple[int, ...]) -> tuple[float, int]:
    """CPU seconds from a request's arrival to its only token, and how many tokens of it were cached."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
    job = Job(RequestId(name), GatewayId("g"), TenantId("t"), ModelName("m"), tokens, sampling, 0, 2**60)
    before = engine.totals.cached_tokens
    started_s = time.process_time()
    engine.submit(job)
    while engine.has_work:
        engine.step()
    return time.process_time() - started_s, engine.totals.cached_tokens - before


def table(reuse: Reuse) -> str:
    """The figures beside their goals."""
    share = reuse.lookup_s / reuse.warm_s
    rows = [
        ("TTFT of 2,000 tokens, cold", f"{reuse.cold_s * 1e3:,.0f} ms", ""),
        (f"TTFT of 2,000 tokens, the first 1,900 known ({reuse.cached_tokens:,} found)", f"{reuse.warm_s * 1e3:,.0f} ms, {reuse.ratio:.1%} of the cold one", _against(reuse.ratio <= GOAL_RATIO, "at most 12%")),
        ("hashing and lookup of that prompt", f"{reuse.lookup_s * 1e3:.2f} ms, {share:.2%} of the shorter TTFT", _against(share < GOAL_SHARE, "under 1%")),
        (f"the same among 10,000 other prefixes ({reuse.num_nodes:,} pages)", f"{reuse.crowded_s * 1e3:.2f} ms, p99 {reuse.crowded_p99_s * 1e3:.2f} ms", _against(reuse.crowded_p99_s < GOAL_LOOKUP_S, "under 1 ms")),
    ]  # fmt: skip
    return "\n".join(
        ["| prefix reuse (CPU time) | | goal |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _against(is_met: bool, goal: str) -> str:
    return f"{goal}: {'reached' if is_met else '**missed**'}"


def write(reuse: Reuse, folder: Path) -> None:
    """JSON and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prefix_reuse.json").write_text(json.dumps(asdict(reuse), indent=1) + "\n")
    (folder / "prefix_reuse.md").write_text(table(reuse) + "\n")
