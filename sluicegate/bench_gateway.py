"""`sluicegate bench gateway`: what a request costs a gateway in CPU time before its job is queued, over a real Valkey.

Authentication (the key known from the last half second, and looked up) and admission (everything up to the job's place in the queue) are timed apart: one
request after the other, which then share nothing that a busy gateway's requests share (waking up for Redis, writing to it, reading from it), and with several under way.
"""

import asyncio
import hashlib
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

GOAL_US = 300
WARM_UP = 50
PROMPT_TOKENS = 500
AT_ONCE = 16


def run(arguments: Namespace) -> None:
    """Measure and print."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_measure(Path(folder), arguments.requests))
    for name, samples in rows.items():
        ordered = sorted(samples)
        print(f"{name:<34} median {statistics.median(ordered):6.0f} us   p90 {ordered[len(ordered) * 9 // 10]:6.0f} us")
    crowd = f", {AT_ONCE} at once"
    for key, how in (("key known", crowd), ("key known", ""), ("key looked up", "")):
        total = statistics.median(rows[f"authentication, {key}"]) + statistics.median(rows[f"admission{how}"])
        print(f"{f'together, {key}{how}':<34} median {total:6.0f} us   goal {GOAL_US} us")


async def _measure(folder: Path, num_requests: int) -> dict[str, list[float]]:
    from aiohttp.test_utils import make_mocked_request

    async with _gateway(folder) as (parts, key, call):
        request = make_mocked_request("POST", "/v1/chat/completions", headers={"Authorization": f"Bearer {key}"})
        caller = await parts.auth.tenant(request)

        async def forgotten() -> None:
            parts.auth._cache.clear()
            await parts.auth.tenant(request)

        async def admitted() -> None:
            opened = parts.generations.open(call, caller)
            await opened.__aenter__()
            opening.append(opened)

        async def several() -> None:
            await asyncio.gather(*(admitted() for _ in range(AT_ONCE)))

        async def let_go() -> None:
            while opening:
                await opening.pop().__aexit__(None, None, None)
            await parts.generations.close()  # until the jobs are taken back: not a part of admission

        opening: list[Any] = []
        return {
            "authentication, key known": await _times(lambda: parts.auth.tenant(request), num_requests),
            "authentication, key looked up": await _times(forgotten, num_requests),
            "admission": await _times(admitted, num_requests, let_go),
            f"admission, {AT_ONCE} at once": await _times(several, -(-num_requests // AT_ONCE), let_go, AT_ONCE),
        }


async def _times(
    step: Callable[[], Awaitable[Any]],
    count: int,
    after: Callable[[], Awaitable[None]] | None = None,
    requests: int = 1,
) -> list[float]:
    """Microseconds of this process' CPU time that a request takes in each run of a step for so many of them; `after` isn't counted."""
    samples = []
    for _ in range(WARM_UP // requests + count):
        started_s = time.process_time()
        await step()
        samples.append((time.process_time() - started_s) * 1e6 / requests)
        if after is not None:
            await after()
    return samples[WARM_UP // requests :]


@asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[tuple[Any, str, Any]]:
    """The parts of a gateway, a tenant's key, and a call for a model that a worker claims to serve."""
    from gateway.app import running_parts
    from gateway.intake.call import GenerationCall
    from gateway.settings import GatewaySettings
    from gateway.tenant_store import TenantStore
    from protocol.ids import TenantId
    from protocol.job import SamplingParams
    from sluicegate.child import Child
    from sluicegate.valkey import embedded_valkey

    server = embedded_valkey(folder)
    child = await Child.start("redis", server.command, folder / "redis.log", {})
    settings = GatewaySettings(server.url, b"p" * 32, b"s" * 32, intake_processes=1)
    try:
        await _until_up(server.url)
        async with running_parts(settings) as parts:
            store = TenantStore(parts.link.commands, parts.link.keys, settings.key_pepper)
            await store.create_tenant(TenantId("bench"), "bench")
            key = (await store.create_key(TenantId("bench"), "bench")).secret
            model = await _claim_model(parts)
            prompt = tuple(range(PROMPT_TOKENS))
            call = GenerationCall(
                "chat", model, (prompt,), (SamplingParams(64, 1),), n=1, stream=True, include_usage=False, echo=False,
                cache_salt=None, timeout_s=None,
            )  # fmt: skip
            while not parts.reader.is_open:
                await asyncio.sleep(0.01)
            yield parts, key, call
    finally:
        await child.end(5.0)


async def _until_up(url: str) -> None:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    async with asyncio.timeout(20):
        while True:
            client = Redis.from_url(url)
            try:
                await client.ping()
                return
            except (RedisError, OSError):
                await asyncio.sleep(0.05)
            finally:
                await client.aclose()


async def _claim_model(parts: Any) -> str:
    """What a worker's heartbeat leaves in Redis, for an hour."""
    from protocol.codec import encode
    from protocol.ids import ModelName, WorkerId
    from protocol.model_card import ModelCard, TokenizerSpec, WorkerStatus
    from protocol.scripts import ANNOUNCE_MODEL, HEARTBEAT

    model, worker, ttl_ms = ModelName("bench/model"), WorkerId("worker-bench"), 3_600_000
    keys, client = parts.link.keys, parts.link.commands
    card = encode(
        ModelCard(model, "d" * 64, "llama", 8192, 8192, TokenizerSpec("{}", (), None, None, False, (), 8192), 0)
    )
    digest = hashlib.sha256(card).hexdigest()
    names = [keys.workers(model), keys.worker(model, worker), keys.card(model, digest)]
    status = WorkerStatus(worker, model, digest, 1024, 1024, 0, 0, 0, 32)
    await client.eval(HEARTBEAT, 3, *names, worker, encode(status), ttl_ms)
    await client.set(names[2], card, px=ttl_ms)
    await client.eval(ANNOUNCE_MODEL, 1, keys.models, model, ttl_ms)
    await parts.directory.refresh()
    return str(model)
