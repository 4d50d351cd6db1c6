"""Admission against all limits at once, and settlement: each admitted request is settled once, whatever way it ends.

An admission that's interrupted or whose answer gets lost is taken back in the background; a settlement that Redis doesn't take is tried until
it does. If this process dies, `upkeep` of another one settles what it held.
"""

import asyncio
from typing import Any

import structlog

from gateway.auth import Principal
from gateway.errors import ApiError, unauthorized
from gateway.intake.call import GenerationCall
from gateway.limits.account import Account, Note
from gateway.limits.charges import Charge, ask_of, charges_of
from gateway.limits.refusal import Standing, rate_headers, refusal
from gateway.limits.settlement import Settlement
from gateway.pending_job import PendingJob
from gateway.price_store import PriceBook
from gateway.redis_link import NETWORK_ERRORS, RETRY_S, RedisLink
from gateway.scripts import run_script
from gateway.tenancy_watch import TenancyWatch
from protocol.account_scripts import ADMIT
from protocol.codec import pack, unpack_list
from protocol.ids import ModelName, TenantId
from protocol.limits import Price

_log = structlog.get_logger(__name__)

ANNOUNCED_S = 3600.0
ANNOUNCE_AGAIN_S = 600.0


class Ledger:
    """Open accounts of this process."""

    def __init__(
        self, link: RedisLink, watch: TenancyWatch, prices: PriceBook, lease_s: float, keep_rows_s: int
    ) -> None:
        self._link = link
        self._watch = watch
        self._prices = prices
        self._lease_ms = int(lease_s * 1000)
        self._keep_rows_s = keep_rows_s
        self._announced: dict[TenantId, float] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.open: set[Account] = set()

    async def admit(self, call: GenerationCall, caller: Principal, jobs: list[PendingJob]) -> Account:
        """Take what the call can use at most; raises ApiError 429 or 503, and then nothing is taken."""
        account, asked = self._account(call, caller, jobs, await self._prices.of(call.model))
        if not self.is_announced(caller.tenant):
            await self._link.call(self.announce(caller.tenant))
        taking = asyncio.ensure_future(self._take(account, asked))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._in_background(self._forget_when_taken(taking, account))
            raise
        return account

    def settle(self, account: Account) -> None:
        """The request has ended; goes on in the background, since its client may be gone."""
        account.final = account.counts(_now_s())
        self._in_background(self._settle(account, is_accepted=account.was_accepted))

    def is_announced(self, tenant: TenantId) -> bool:
        """Whether gateways look after this tenant's leases."""
        return _now_s() - self._announced.get(tenant, float("-inf")) < ANNOUNCE_AGAIN_S

    async def announce(self, tenant: TenantId) -> None:
        """Make gateways look after this tenant's leases; errors of Redis pass through."""
        until_ms = self._watch.now_ms() + int(ANNOUNCED_S * 1000)
        await self._link.commands.zadd(self._link.keys.metered, {tenant: until_ms})
        if len(self._announced) > 100_000:
            self._announced.clear()
        self._announced[tenant] = _now_s()

    async def close(self) -> None:
        """Until all is settled, or Redis has not answered for a while: leases then run out by themselves."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=2.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _account(
        self, call: GenerationCall, caller: Principal, jobs: list[PendingJob], price: Price
    ) -> tuple[Account, list[Charge]]:
        account_id = jobs[0].request_id  # one name for a request in usage, audit and the workers' logs
        ask = ask_of(call, account_id, tuple(job.request_id for job in jobs))
        charges = charges_of(self._link.keys, caller, ask, price)
        prices = (price.input, price.cached_input, price.output)
        note = Note(caller.key_id, ModelName(call.model), ask.samples, prices, tuple(charge.what for charge in charges))
        return Account(account_id, caller.tenant, note, charges, call, jobs, _now_s()), charges

    async def _take(self, account: Account, charges: list[Charge]) -> None:
        keys = self._link.keys
        places = [keys.open_requests(account.tenant), keys.leases(account.tenant), keys.deleted(account.tenant)]
        places += [charge.redis_key for charge in charges]
        arguments = [account.id, self._lease_ms, account.note.to_text(), pack([c.wire() for c in charges]), 0]
        try:
            reply = unpack_list(await self._link.call(run_script(self._link.fast, ADMIT, places, arguments)))
        except ApiError:
            # It may have been carried out all the same.
            self._in_background(self._settle(account, is_accepted=False))
            raise
        if reply[0] < 0:
            raise unauthorized()
        standings = standings_of(charges, reply)
        if not reply[0]:
            number, wait_s = reply[-2:]
            raise refusal(charges[number - 1], wait_s, standings)
        account.started_ms = reply[1]
        account.headers = rate_headers(standings)
        self.open.add(account)

    async def _forget_when_taken(self, taking: "asyncio.Future[None]", account: Account) -> None:
        try:
            await taking
        except ApiError:
            return
        await self._settle(account, is_accepted=False)

    async def _settle(self, account: Account, *, is_accepted: bool) -> None:
        ended_ms = self._watch.now_ms()
        row = None
        if is_accepted:
            counts = account.counts(_now_s())
            row = account.note.row(account.id, account.tenant, counts, *account.outcome(), account.started_ms, ended_ms)
        places = [charge.redis_key for charge in account.charges]
        settlement = Settlement(account.tenant, account.id, account.note, places, row, ended_ms)
        while True:
            try:
                await settlement.write(self._link.fast, self._link.keys, self._keep_rows_s)
                break
            except NETWORK_ERRORS:
                # Until it's written its lease is renewed, so that nobody else writes less than we know.
                await asyncio.sleep(RETRY_S)
        self.open.discard(account)

    def _in_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("settlement_crashed", error=repr(task.exception())[:300])


def standings_of(charges: list[Charge], reply: list[int]) -> list[Standing]:
    """The counters in a reply of ADMIT."""
    return [Standing(charge, reply[2 + 2 * i], reply[3 + 2 * i]) for i, charge in enumerate(charges)]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
