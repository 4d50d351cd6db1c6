"""What the way through gateway, queue and worker adds to a request, and how many short requests one gateway answers."""

import json
import statistics

from bench.queue.cpu import cpu_s
from bench.queue.load import at_rate, chat, closed_loop
from bench.queue.rows import Row, percentile
from bench.queue.setting import Setting
from bench.queue.wire import Answer, request

RATE = 200.0
ROUNDS = 3
NUM_CLIENTS = 32
GOAL_P50_MS, GOAL_P99_MS, GOAL_RATIO = 2.0, 10.0, 0.5


async def measure(setting: Setting) -> list[Row]:
    """The two servers in turn, so that a busy moment of the machine meets both."""
    flags = ("--max-sequences", "64", "--kv-tokens", "65536")
    async with setting.fleet("latency", 1, *flags) as fleet, setting.bare_server() as (bare, bare_port):
        gateway = fleet.gateways[0]
        key = await fleet.new_key("acme")
        streamed, plain = chat(key, 1, stream=True), chat(key, 1, stream=False)
        bare_raw = request("/json", json.dumps({"messages": [{"role": "user", "content": "Hello there."}]}).encode())
        await at_rate(gateway.port, streamed, RATE, 1.0)
        await at_rate(bare_port, bare_raw, RATE, 1.0)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(ROUNDS):
            ours += _first_bytes_ms(await at_rate(gateway.port, streamed, RATE, setting.seconds / ROUNDS))
            theirs += _first_bytes_ms(await at_rate(bare_port, bare_raw, RATE, setting.seconds / ROUNDS))
        rates, cpu_rates = [], []
        for _ in range(ROUNDS):
            pairs = []
            for port, raw, pid in ((gateway.port, plain, gateway.child.pid), (bare_port, bare_raw, bare.pid)):
                used_s = cpu_s(pid)
                answers, took_s = await closed_loop(port, lambda _, raw=raw: raw, NUM_CLIENTS, setting.seconds / ROUNDS)  # type: ignore[misc]
                _check(answers)
                pairs.append((len(answers) / took_s, len(answers) / max(cpu_s(pid) - used_s, 0.01)))
            rates.append((pairs[0][0], pairs[1][0]))
            cpu_rates.append((pairs[0][1], pairs[1][1]))
    return [_latency_row(ours, theirs), _rate_row(rates, cpu_rates)]


def _latency_row(ours: list[float], theirs: list[float]) -> Row:
    p50, p99 = (percentile(ours, share) - percentile(theirs, share) for share in (0.5, 0.99))
    return Row(
        f"added latency at {RATE:.0f} requests/s over a bare aiohttp handler",
        f"p50 +{p50:.2f} ms, p99 +{p99:.2f} ms",
        f"p50 at most +{GOAL_P50_MS:g} ms, p99 at most +{GOAL_P99_MS:g} ms",
        p50 <= GOAL_P50_MS and p99 <= GOAL_P99_MS,
        {"gateway_ms": sorted(ours), "bare_ms": sorted(theirs)},
    )


def _rate_row(rates: list[tuple[float, float]], cpu_rates: list[tuple[float, float]]) -> Row:
    ratio = statistics.median(ours / theirs for ours, theirs in rates)
    cpu_ratio = statistics.median(ours / theirs for ours, theirs in cpu_rates)
    ours, theirs = (statistics.median(pair[side] for pair in rates) for side in (0, 1))
    return Row(
        "short requests, not streamed, of a bare handler's requests/s",
        f"{ratio:.0%} ({ours:.0f} of {theirs:.0f}/s); for each CPU second {cpu_ratio:.0%}",
        f"at least {GOAL_RATIO:.0%}",
        ratio >= GOAL_RATIO,
        {"gateway_per_s": ours, "bare_per_s": theirs, "ratio": ratio, "ratio_per_cpu_second": cpu_ratio},
    )


def _first_bytes_ms(answers: list[Answer]) -> list[float]:
    _check(answers)
    return [(answer.first_byte_s - answer.sent_s) * 1e3 for answer in answers]


def _check(answers: list[Answer]) -> None:
    bad = {answer.status for answer in answers} - {200}
    if bad:
        raise RuntimeError(f"requests were answered with {bad}")
