"""Reading usage: rows of single requests, and sums by hour or day."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from protocol.errors import DecodeError
from protocol.ids import TenantId
from protocol.key_space import KeySpace
from protocol.usage import SUMS, Span, UsageRow, parse_sum_field, row_from_fields

MAX_DAYS_BY_HOUR = 35
MAX_MONTHS = 27
PIPELINED = 100
BATCH = 500


@dataclass(frozen=True, slots=True)
class UsageSum:
    """What a tenant's key used of a model in an hour or a day that begins at `start_ms`."""

    tenant: TenantId
    start_ms: int
    model: str
    key: str
    amounts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))


class RangeTooLongError(ValueError):
    """More hours or days are asked for than are kept."""


class UsageStore:
    """Reads through one Redis client; errors of the client pass through."""

    def __init__(self, client: Any, keys: KeySpace) -> None:
        self._client = client
        self._keys = keys

    async def rows(self, tenant: TenantId, from_ms: int, to_ms: int, most: int) -> list[UsageRow]:
        """Requests that ended in [from, to), the latest `most` of them in order of time."""
        rows: list[UsageRow] = []
        last = f"{to_ms - 1}-{2**63 - 1}"
        while len(rows) < most:
            # In pieces: a gateway's streams go on in between.
            count = min(most - len(rows), BATCH)
            found = await self._client.xrevrange(self._keys.usage_rows(tenant), max=last, min=from_ms, count=count)
            rows += [row for row in map(_row, found) if row is not None]
            if len(found) < count:
                break
            last = "(" + found[-1][0].decode()
        return rows[::-1]

    async def sums(self, tenants: list[TenantId], span: Span, from_ms: int, to_ms: int) -> list[UsageSum]:
        """Sums of all hours or days that touch [from, to), by time; raises RangeTooLongError."""
        places = [
            (tenant, start, self._place(tenant, span, start))
            for start in _periods(span, from_ms, to_ms)
            for tenant in tenants
        ]
        found = []
        for first in range(0, len(places), PIPELINED):
            batch = places[first : first + PIPELINED]
            pipeline = self._client.pipeline(transaction=False)
            for _, _, key in batch:
                pipeline.hgetall(key)
            for (tenant, start, _), raw in zip(batch, await pipeline.execute(), strict=True):
                found += _sums(tenant, span, start, raw)
        spanned_ms = 3_600_000 if span == "hour" else 86_400_000
        within = [one for one in found if one.start_ms + spanned_ms > from_ms and one.start_ms < to_ms]
        return sorted(within, key=lambda one: (one.start_ms, one.tenant, one.model, one.key))

    def _place(self, tenant: TenantId, span: Span, start: datetime) -> str:
        if span == "hour":
            return self._keys.usage_hours(tenant, start.strftime("%Y%m%d"))
        return self._keys.usage_days(tenant, start.strftime("%Y%m"))


def _row(entry: tuple[bytes, dict[bytes, bytes]]) -> UsageRow | None:
    try:
        return row_from_fields(entry[1])
    except DecodeError:
        return None  # of another version


def total(sums: list[UsageSum]) -> dict[str, int]:
    """All sums together."""
    return {name: sum(one.amounts[name] for one in sums) for name in SUMS}


def _periods(span: Span, from_ms: int, to_ms: int) -> Iterator[datetime]:
    """The days (for hours) or months (for days) whose hashes hold the range."""
    day = datetime.fromtimestamp(from_ms / 1000, timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    start = day if span == "hour" else day.replace(day=1)
    most = MAX_DAYS_BY_HOUR if span == "hour" else MAX_MONTHS
    for _ in range(most + 1):
        if start.timestamp() * 1000 >= to_ms:
            return
        yield start
        if (start.year, start.month) == (9999, 12):
            return  # the calendar ends
        start = start + timedelta(days=1) if span == "hour" else (start + timedelta(days=32)).replace(day=1)
    raise RangeTooLongError(f"usage by {span} is for at most {most} {'days' if span == 'hour' else 'months'} at once")


def _sums(tenant: TenantId, span: Span, start: datetime, raw: dict[bytes, bytes]) -> list[UsageSum]:
    amounts: dict[tuple[datetime, str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(SUMS, 0))
    for name, value in raw.items():
        try:
            slot, model, key, counted = parse_sum_field(name)
            when = start.replace(hour=int(slot)) if span == "hour" else start.replace(day=int(slot))
            amounts[when, model, key][counted] = int(value)
        except (DecodeError, ValueError):
            continue  # of another version
    return [
        UsageSum(tenant, int(when.timestamp() * 1000), model, key, counts)
        for (when, model, key), counts in amounts.items()
    ]
