"""How many tokens one gateway passes on to 64 clients, and what that costs Redis."""

from bench.queue.cpu import cpu_s
from bench.queue.load import chat, closed_loop
from bench.queue.rows import Row
from bench.queue.setting import Fleet, Setting
from bench.queue.wire import request

NUM_CLIENTS = 64
NUM_WORKERS = 4
NUM_TOKENS = 1000
GOAL_PER_S, GOAL_RATIO, GOAL_WRITES = 40_000, 0.6, 1.05


async def measure(setting: Setting) -> list[Row]:
    """Through the gateway, and ready-made events of bare aiohttp: one in each write, and 16."""
    # Several workers, so that it's the gateway that is at its limit.
    flags = ("--max-sequences", str(NUM_CLIENTS // NUM_WORKERS), "--kv-tokens", "65536")
    async with setting.fleet("streams", NUM_WORKERS, *flags) as fleet, setting.bare_server() as (bare, bare_port):
        gateway = fleet.gateways[0]
        key = await fleet.new_key("acme")
        await closed_loop(gateway.port, lambda n: chat(key, 50, stream=True, text=f"warm {n}"), NUM_CLIENTS, 0.5)
        before = await _writes_and_steps(fleet)
        ours = await _tokens_per_s(
            gateway.port, gateway.child.pid, setting, lambda n: chat(key, NUM_TOKENS, stream=True, text=f"Hello {n}.")
        )
        after = await _writes_and_steps(fleet)
        single = await _tokens_per_s(
            bare_port, bare.pid, setting, lambda _: request(f"/stream/{NUM_TOKENS}/1", b"{}"), counts_events=True
        )
        joined = await _tokens_per_s(
            bare_port, bare.pid, setting, lambda _: request(f"/stream/{NUM_TOKENS}/16", b"{}"), counts_events=True
        )
    writes = (after[0] - before[0]) / max(after[1] - before[1], 1)
    return [_tokens_row(ours, single, joined), _writes_row(writes)]


async def _tokens_per_s(
    port: int, pid: int, setting: Setting, make: object, *, counts_events: bool = False
) -> dict[str, float]:
    used_s = cpu_s(pid)
    answers, took_s = await closed_loop(port, make, NUM_CLIENTS, setting.seconds)  # type: ignore[arg-type]
    used_s = max(cpu_s(pid) - used_s, 0.01)
    num_events = sum(answer.num_events for answer in answers)
    tokens = num_events if counts_events else sum(answer.num_tokens for answer in answers)
    return {"per_s": tokens / took_s, "per_cpu_s": tokens / used_s, "events_per_token": num_events / max(tokens, 1)}


def _tokens_row(ours: dict[str, float], single: dict[str, float], joined: dict[str, float]) -> Row:
    ratio = ours["per_s"] / single["per_s"]
    return Row(
        f"tokens/s through one gateway to {NUM_CLIENTS} clients",
        f"{ours['per_s']:,.0f} ({ours['per_cpu_s']:,.0f} for each CPU second of the gateway), {ratio:.0%} of bare writes "
        f"({single['per_s']:,.0f}; {joined['per_s']:,.0f} with 16 events in a write)",
        f"at least {GOAL_PER_S:,} and {GOAL_RATIO:.0%} of bare aiohttp writes",
        ours["per_s"] >= GOAL_PER_S and ratio >= GOAL_RATIO,
        {"gateway": ours, "bare": single, "bare_joined": joined},
    )


def _writes_row(writes: float) -> Row:
    return Row(
        "writes to reply streams for each engine step", f"{writes:.2f}", "1 for each gateway", writes <= GOAL_WRITES,
        {"writes_per_step": writes},
    )  # fmt: skip


async def _writes_and_steps(fleet: Fleet) -> tuple[float, float]:
    """XADDs that were no submissions of jobs, and engine steps, since the start."""
    client = fleet.client()
    try:
        stats = await client.info("commandstats")
    finally:
        await client.aclose()
    statuses = await fleet.statuses()
    added = float(stats.get("cmdstat_xadd", {}).get("calls", 0))
    submitted = await fleet.metric('sluicegate_http_requests_total{route="/v1/chat/completions"')
    return added - submitted, float(sum(status["engine_steps"] for status in statuses))
