"""Times authentication, admission and settlement: the CPU time of the gateway's process for a request, without HTTP.

    python -m bench.admission

A real Valkey runs beside it. Three tenants: one without limits, one with the usual three, one with eight limits and budgets of tenant and key.
"""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway.auth import Authenticator
from gateway.intake.call import GenerationCall
from gateway.limits.account import Account
from gateway.limits.ledger import Ledger
from gateway.mailbox import Mailbox
from gateway.pending_job import PendingJob
from gateway.price_store import PriceBook, PriceStore
from gateway.redis_link import NETWORK_ERRORS, RedisLink, open_redis
from gateway.tenancy_watch import TenancyWatch
from gateway.tenant_store import TenantStore
from protocol.ids import GatewayId, ModelName, TenantId, new_request_id
from protocol.job import Job, SamplingParams
from protocol.limits import UNLIMITED, Budget, Limits
from protocol.replies import Done
from sluicegate.valkey import embedded_valkey

NUM_REQUESTS = 2000
AT_ONCE = 50
PEPPER = b"p" * 32
MODEL = ModelName("some/model")
USUAL = Limits(requests_per_minute=10**6, tokens_per_minute=10**9, concurrent_requests=1000)
MANY = Limits(requests_per_minute=10**6, tokens_per_minute=10**9, concurrent_requests=1000, queued_jobs=1000)
TENANTS: dict[str, tuple[dict[str, Any], Limits]] = {
    "none": ({}, UNLIMITED),
    "three": ({"limits": USUAL}, UNLIMITED),
    "eight": ({"limits": MANY, "budgets": (Budget("month", "tokens", 2**49), Budget("month", "money", 2**49))}, USUAL),
}
CALL = GenerationCall(
    "chat", MODEL, ((1,) * 300,), (SamplingParams(200, 1),), 1, stream=True, include_usage=False, echo=False, cache_salt=None, timeout_s=None,
)  # fmt: skip


class Door:
    """A gateway's parts from the key to the admission."""

    def __init__(self, link: RedisLink) -> None:
        self.store = TenantStore(link.commands, link.keys, PEPPER)
        watch = TenancyWatch(link)
        prices = PriceBook(link, PriceStore(link.commands, link.keys, PEPPER), watch)
        self.ledger = Ledger(link, watch, prices, lease_s=15.0, keep_rows_s=86_400)
        self.auth = Authenticator(link, self.store, watch, PEPPER, None, cache_s=0.5)

    async def admit(self, request: web.Request) -> Account:
        """What happens to a request between its head and the queue, less its body."""
        caller = await self.auth.tenant(request)
        made = Job(new_request_id(), GatewayId("g"), caller.tenant, MODEL, CALL.prompts[0], CALL.samplings[0], 0, 2**60)
        job = PendingJob(made, 0, Mailbox(), 0.0)
        account = await self.ledger.admit(CALL, caller, [job])
        job.is_accepted, job.last = True, Done(300, 0, 50)
        return account

    async def settle(self, accounts: list[Account]) -> None:
        """Until all are settled."""
        for account in accounts:
            self.ledger.settle(account)
        await self.ledger.close()


def main() -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        server = embedded_valkey(Path(folder))
        process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(_measure(server.url))
        finally:
            process.terminate()
            process.wait()


async def _measure(url: str) -> None:
    async with open_redis(url, "bench") as link:
        await _answers(link)
        print(f"{'limits':<8} {'key':>9} {'admission':>11} {'settlement':>11}   us of CPU for a request")
        for name, (fields, key_limits) in TENANTS.items():
            door = Door(link)
            tenant = TenantId(name)
            await door.store.create_tenant(tenant, name, **fields)
            secret = (await door.store.create_key(tenant, "bench", limits=key_limits)).secret
            request = make_mocked_request("POST", "/", {"Authorization": f"Bearer {secret}"})
            await door.settle([await door.admit(request) for _ in range(100)])
            print(f"{name:<8} " + " ".join(f"{cost:>10.1f}" for cost in await _costs(door, request)))


async def _costs(door: Door, request: web.Request) -> tuple[float, float, float]:
    async def keys() -> None:
        for _ in range(NUM_REQUESTS):
            await door.auth.tenant(request)

    key_s = await _cpu_s(keys)
    admit_s = settle_s = 0.0
    for _ in range(NUM_REQUESTS // AT_ONCE):
        accounts: list[Account] = []

        async def admit(into: list[Account] = accounts) -> None:
            into.extend(await asyncio.gather(*(door.admit(request) for _ in range(AT_ONCE))))

        async def settle(done: list[Account] = accounts) -> None:
            await door.settle(done)

        admit_s += await _cpu_s(admit)
        settle_s += await _cpu_s(settle)
    return key_s / NUM_REQUESTS * 1e6, admit_s / NUM_REQUESTS * 1e6, settle_s / NUM_REQUESTS * 1e6


async def _cpu_s(work: Callable[[], Coroutine[Any, Any, None]]) -> float:
    before_s = time.process_time()
    await work()
    return time.process_time() - before_s


async def _answers(link: RedisLink) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                await link.commands.ping()
            except NETWORK_ERRORS:
                await asyncio.sleep(0.05)
            else:
                return


if __name__ == "__main__":
    main()
