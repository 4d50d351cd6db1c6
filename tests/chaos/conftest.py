"""Fleets of real processes that are killed and stopped under load, and clients that note exactly what they were told.

The sizes come from the environment: small in the normal suite, large with `make chaos` and `make soak`.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp
import pytest

from sluicegate.child import Child
from sluicegate.fleet import Fleet, Gateway, open_fleet
from sluicegate.valkey import _binary

SEED = int(os.environ.get("CHAOS_SEED", "1"))
REQUEST_TIMEOUT_S = 90.0
SYNTHETIC = ("--engine", "synthetic", "--max-sequences", "16", "--kv-tokens", "65536")


@dataclass
class Outcome:
    """What a client was told. `is_lost` is set if its connection broke, as when its gateway was killed."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    completion_tokens: int | None = None
    num_terminals: int = 0
    num_done: int = 0
    is_lost: bool = False
    has_left: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole answer."""
        return self.status == 200 and self.finish_reason is not None and self.error is None

    def check(self) -> None:
        """Exactly one terminal message, and for a stream exactly one end mark."""
        if self.is_lost or self.has_left:
            return
        assert 1 == self.num_terminals, self
        assert (1 if self.status == 200 else 0) == self.num_done, self

    def take(self, data: str) -> None:
        """One event of a stream."""
        if data == "[DONE]":
            self.num_done += 1
            return
        assert self.num_done == 0, "something came after the end"
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["code"]
            self.num_terminals += 1
            return
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            assert self.finish_reason is None, "something came after the finish reason"
            self.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                self.finish_reason = choice["finish_reason"]
                self.num_terminals += 1


async def ask(
    session: aiohttp.ClientSession, url: str, key: str, body: dict, leave_after: int | None = None
) -> Outcome:
    """One streamed chat request; with `leave_after` the client hangs up after so many events."""
    outcome = Outcome()
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        async with (
            asyncio.timeout(REQUEST_TIMEOUT_S),
            session.post(
                f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response,
        ):
            outcome.status = response.status
            if response.status != 200:
                outcome.error = (await response.json())["error"]["code"]
                outcome.num_terminals = 1
                return outcome
            num_events = 0
            async for line in response.content:
                if line.startswith(b"data: "):
                    if num_events == leave_after:
                        outcome.has_left = True
                        response.close()
                        return outcome
                    num_events += 1
                    outcome.take(line[6:].decode().strip())
    except aiohttp.ClientError:
        outcome.is_lost = True
    return outcome


@dataclass
class Arena:
    """A fleet with clients. `outcomes` holds everything that anybody was told."""

    fleet: Fleet
    session: aiohttp.ClientSession
    key: str
    worker_flags: tuple[str, ...]
    model: str
    random: Random = field(default_factory=lambda: Random(SEED))
    outcomes: list[tuple[dict, Outcome]] = field(default_factory=list)
    killed_urls: set[str] = field(default_factory=set)
    unready_urls: set[str] = field(default_factory=set)  # that a load balancer wouldn't send anything to
    num_kills: int = 0

    def body(self, prompt: str, **options) -> dict:
        return {
            "model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 40, **options,
        }  # fmt: skip

    def gateway(self) -> Gateway:
        running = [gateway for gateway in self.fleet.gateways if gateway.child.is_running]
        return self.random.choice([gateway for gateway in running if gateway.url not in self.unready_urls])

    async def ask(self, body: dict, leave_after: int | None = None, key: str = "") -> Outcome:
        """A request to any gateway; checked: only a client that left or whose gateway was killed may lack its end."""
        url = self.gateway().url
        outcome = await ask(self.session, url, key or self.key, body, leave_after)
        assert not outcome.is_lost or url in self.killed_urls, f"the connection to a living gateway broke: {outcome}"
        outcome.check()
        self.outcomes.append((body, outcome))
        return outcome

    async def kill_worker(self) -> None:
        """kill -9 one of the workers and start another."""
        victim = self.random.choice(self.fleet.workers)
        self.fleet.kill(victim)
        await self._replace(victim)

    async def freeze_worker(self, seconds: float) -> None:
        """SIGSTOP one of the workers, start another, and let the first go on later, then end it: a zombie that wakes."""
        victim = self.random.choice(self.fleet.workers)
        self.fleet.kill(victim, signal.SIGSTOP)
        self.fleet.workers.remove(victim)
        await self.fleet.add_worker(*self.worker_flags)
        self.num_kills += 1
        await asyncio.sleep(seconds)
        self.fleet.kill(victim, signal.SIGCONT)
        await asyncio.sleep(1.0)
        self.fleet.kill(victim)
        await victim.wait()

    async def kill_gateway(self) -> None:
        """kill -9 one of the gateways and start another in its place."""
        victim = self.gateway()
        self.killed_urls.add(victim.url)
        self.fleet.kill(victim.child)
        await victim.child.wait()
        await self.fleet.reap()
        await self.fleet.add_gateway(port=victim.port)

    async def restart_redis(self) -> None:
        """Start the fleet's own Redis again, with its configuration and whatever data there are."""
        command = [str(_binary()), str(self.fleet.folder / "secrets" / "valkey.conf")]
        self.fleet.redis = await Child.start(
            "redis", command, self.fleet.folder / "logs" / "redis-again.log", os.environ
        )

    async def _replace(self, victim) -> None:
        await victim.wait()
        await self.fleet.reap()
        await self.fleet.add_worker(*self.worker_flags)
        self.num_kills += 1


@asynccontextmanager
async def open_arena(
    folder: Path,
    gateways: int,
    workers: int,
    flags: tuple[str, ...],
    model: str = "synthetic",
    redis_url: str | None = None,
) -> AsyncIterator[Arena]:
    async with open_fleet(folder, redis_url) as fleet, aiohttp.ClientSession() as session:
        for _ in range(gateways):
            await fleet.add_gateway()
        for _ in range(workers):
            await fleet.add_worker(*flags)
        key = await fleet.new_key("acme")
        await fleet.wait_until_ready()
        yield Arena(fleet, session, key, flags, model)


@pytest.fixture
def new_arena(tmp_path: Path) -> Callable[..., object]:
    """Opens arenas in the test's folder: gateways, workers, further flags of the workers."""

    def opened(gateways: int, workers: int, *flags: str, engine: tuple[str, ...] = SYNTHETIC, **options):
        return open_arena(tmp_path / "fleet", gateways, workers, (*engine, *flags), **options)

    return opened
