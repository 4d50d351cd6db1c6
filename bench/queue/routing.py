"""Whether a conversation's turns find what was computed before, with jobs sent to the workers that hold it and with jobs sent to whoever asks."""

import asyncio
import itertools
import re
import statistics
from functools import partial

from bench.queue.load import MODEL, chat
from bench.queue.rows import Row
from bench.queue.setting import Setting
from bench.queue.wire import Connection, connect

NUM_WORKERS = 3
CONVERSATIONS = 12
TURNS = 6
PAUSE_S = 0.05
QUESTION = "A question of some length about something that was said before. " * 4
GOAL_SHARE = 0.95
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')


async def measure(setting: Setting) -> list[Row]:
    """Twelve conversations at a time over three workers of eight slots, twice: two stacks that differ in the gateway's flag."""
    found = {routing: await _talk(setting, routing) for routing in ("on", "off")}
    on, off = found["on"], found["off"]
    return [
        Row(
            f"later turns of conversations that find their prefix, {NUM_WORKERS} workers",
            f"{on['hits']:.0%} ({on['tokens']:.0%} of their prompt tokens, median TTFT {on['ttft_ms']:.0f} ms); without routing "
            f"{off['hits']:.0%} ({off['tokens']:.0%}, {off['ttft_ms']:.0f} ms)",
            f"at least {GOAL_SHARE:.0%}",
            on["hits"] >= GOAL_SHARE,
            {"routing_on": on, "routing_off": off},
        )
    ]


async def _talk(setting: Setting, routing: str) -> dict[str, float]:
    rates = ("--prefill-rate", "4000", "--decode-rate", "50", "--max-sequences", "8", "--kv-tokens", "65536")
    async with setting.fleet(f"routing-{routing}", NUM_WORKERS, *rates, gateway_flags=("--routing", routing)) as fleet:
        key = await fleet.new_key("acme")
        port = fleet.gateways[0].port
        turns = await asyncio.gather(*(_converse(port, key, number) for number in range(CONVERSATIONS)))
        outcomes = {
            name: await fleet.metric(f'sluicegate_routed_jobs_total{{model="{MODEL}",outcome="{name}"')
            for name in ("held", "passed_over", "none")
        }
    later = [turn for conversation in turns for turn in conversation[1:]]
    return {
        # Of what the turn before had computed, the last page may be missing; a page or two of the template's opening are everybody's.
        "hits": statistics.mean(
            cached > 0.8 * before[0] for talk in turns for before, (_, cached, _) in itertools.pairwise(talk)
        ),
        "tokens": sum(cached for _, cached, _ in later) / sum(prompt for prompt, _, _ in later),
        "ttft_ms": statistics.median(ttft_ms for _, _, ttft_ms in later),
        **outcomes,
    }


async def _converse(port: int, key: str, number: int) -> list[tuple[int, int, float]]:
    """Prompt and cached tokens and milliseconds to the first byte, of each turn."""
    connection = await connect(port)
    found, said = [], f"Conversation {number}. "
    for turn in range(TURNS):
        said += f"{turn}. {QUESTION}"
        found.append(await _turn(connection, partial(chat, key, 12 + number, stream=True, text=said)))
        await asyncio.sleep(PAUSE_S)
    connection.close()
    return found


async def _turn(connection: Connection, make: "partial[bytes]") -> tuple[int, int, float]:
    answer = await connection.ask(make())
    prompt, cached = _PROMPT.search(answer.tail), _CACHED.search(answer.tail)
    if answer.status != 200 or prompt is None or cached is None:
        raise RuntimeError(f"a turn was answered with {answer.status}")
    return int(prompt[1]), int(cached[1]), (answer.first_byte_s - answer.sent_s) * 1e3
