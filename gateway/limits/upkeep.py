"""Keeps leases: those of this process' requests are renewed, and requests of gateways that died are settled with what they last reported."""

import asyncio
from collections import defaultdict
from typing import Any

import msgpack
import structlog

from gateway.limits.account import Account, Counts, Note
from gateway.limits.ledger import Ledger
from gateway.limits.settlement import Settlement
from gateway.redis_link import NETWORK_ERRORS, RedisLink
from gateway.scripts import run_script
from gateway.tenancy_watch import TenancyWatch
from protocol.account_scripts import EXPIRED, RENEW
from protocol.codec import pack
from protocol.errors import DecodeError
from protocol.ids import TenantId

_log = structlog.get_logger(__name__)

RELEASE_S = 0.1
MAX_RENEW_S = 1.0  # what a killed gateway has not yet reported is never charged
MAX_RENEWED = 500
MAX_SWEPT = 100
# Its slot is free as soon as a lease has run out. The books wait a little for a gateway that was only cut off.
SETTLE_GRACE_S = 5.0


class Upkeep:
    """One task a gateway."""

    def __init__(self, link: RedisLink, ledger: Ledger, watch: TenancyWatch, lease_s: float, keep_rows_s: int) -> None:
        self._link = link
        self._ledger = ledger
        self._watch = watch
        self._lease_ms = int(lease_s * 1000)
        self._keep_rows_s = keep_rows_s
        self._renew_s = min(lease_s / 4, MAX_RENEW_S)
        self._sweep_s = lease_s / 3

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        renewed_s = swept_s = loop.time()
        while True:
            try:
                await self.release_queued()
                if loop.time() - renewed_s >= self._renew_s:
                    renewed_s = loop.time()
                    await self.renew()
                if loop.time() - swept_s >= self._sweep_s:
                    swept_s = loop.time()
                    await self.sweep()
            except NETWORK_ERRORS:
                swept_s = loop.time()  # after an outage others must have the time to renew first
            await asyncio.sleep(RELEASE_S)

    async def release_queued(self) -> None:
        """Jobs that a worker has taken are no longer queued; errors of Redis pass through."""
        for account in list(self._ledger.open):
            queued = [charge for charge in account.charges if charge.what == "queued"]
            started = [job.request_id for job in account.jobs if job.has_started]
            if queued and len(started) > account.num_released:
                for charge in queued:
                    await self._link.commands.zrem(charge.redis_key, *started)
                account.num_released = len(started)

    async def renew(self) -> None:
        """Renew all leases and report progress; errors of Redis pass through."""
        by_tenant: dict[TenantId, list[Account]] = defaultdict(list)
        for account in self._ledger.open:
            by_tenant[account.tenant].append(account)
        for tenant, accounts in by_tenant.items():
            if not self._ledger.is_announced(tenant):
                await self._ledger.announce(tenant)
            for start in range(0, len(accounts), MAX_RENEWED):
                await self._renew_some(tenant, accounts[start : start + MAX_RENEWED])

    async def _renew_some(self, tenant: TenantId, accounts: list[Account]) -> None:
        now_s = asyncio.get_running_loop().time()
        sets: dict[str, int] = {}
        entries = []
        for account in accounts:
            held = []
            for charge in account.charges:
                members = _held(account, charge.what, charge.members)
                if members:
                    number = sets.setdefault(charge.redis_key, len(sets) + 1)
                    held.append([number, *members])
            entries.append([account.id, account.counts(now_s).to_text(), held])
        keys = self._link.keys
        places = [keys.open_requests(tenant), keys.leases(tenant), keys.progress(tenant), *sets]
        await run_script(self._link.fast, RENEW, places, [self._lease_ms, pack(entries)])

    async def sweep(self) -> None:
        """Settle what others have left; errors of Redis pass through."""
        client, keys = self._link.commands, self._link.keys
        for raw_tenant, until_ms in await client.zrange(keys.metered, 0, -1, withscores=True):
            tenant = TenantId(raw_tenant.decode("utf-8", "replace"))
            places = [keys.open_requests(tenant), keys.leases(tenant), keys.progress(tenant)]
            found = await run_script(client, EXPIRED, places, [int(SETTLE_GRACE_S * 1000), MAX_SWEPT])
            for account_id, record, progress in found:
                await self._settle(tenant, account_id.decode(), record, progress)
            if not found and until_ms < self._watch.now_ms() and not await client.exists(keys.open_requests(tenant)):
                await client.zrem(keys.metered, raw_tenant)

    async def _settle(self, tenant: TenantId, account_id: str, record: bytes, progress: bytes | None) -> None:
        try:
            started_ms, _, text, _, charge_keys = _unpacked(record)
            note = Note.from_text(text)
            counts = Counts() if progress is None else Counts.from_text(progress.decode("utf-8", "replace"))
        except (DecodeError, ValueError, TypeError, IndexError):
            _log.error("open_request_not_understood", tenant=tenant)
            await self._drop(tenant, account_id)
            return
        ended_ms = self._watch.now_ms()
        row = note.row(account_id, tenant, counts, "lost", "gateway_lost", started_ms, ended_ms)
        settlement = Settlement(tenant, account_id, note, charge_keys, row, ended_ms)
        if await settlement.write(self._link.fast, self._link.keys, self._keep_rows_s, only_if_expired=True):
            _log.warning("request_of_lost_gateway_settled", tenant=tenant, request_id=account_id)

    async def _drop(self, tenant: TenantId, account_id: str) -> None:
        client, keys = self._link.commands, self._link.keys
        await client.hdel(keys.open_requests(tenant), account_id)
        await client.zrem(keys.leases(tenant), account_id)
        await client.hdel(keys.progress(tenant), account_id)


def _held(account: Account, what: str, members: tuple[str, ...]) -> list[str]:
    """What a lease still holds: a job leaves the queue when a worker takes it."""
    if what != "queued":
        return list(members)
    return [job.request_id for job in account.jobs if not job.has_started and job.request_id in members]


def _unpacked(record: bytes) -> list[Any]:
    value: list[Any] = msgpack.unpackb(record, raw=False)
    if not isinstance(value, list) or len(value) != 5:
        raise DecodeError("not the record of an open request")
    return value
