"""The end of an account in Redis: once, with the true amounts, a row and its sums."""

from dataclasses import dataclass
from typing import Any

from gateway.limits.account import Note
from gateway.scripts import run_script
from protocol.account_scripts import SETTLE
from protocol.codec import pack
from protocol.ids import TenantId
from protocol.key_space import KeySpace
from protocol.usage import TOTALS, UsageRow, day_place, hour_place, sum_field

DAY_S = 86_400
KEEP_HOURS_S = 35 * DAY_S
KEEP_DAYS_S = 800 * DAY_S


@dataclass(frozen=True, slots=True)
class Settlement:
    """What is written at the end of one request. Without a row it's as if the request had never been."""

    tenant: TenantId
    account_id: str
    note: Note
    charge_keys: list[str]
    row: UsageRow | None
    ended_ms: int

    async def write(self, client: Any, keys: KeySpace, keep_rows_s: int, *, only_if_expired: bool = False) -> bool:
        """Whether this call settled it; errors of the client pass through, and a repetition is harmless."""
        (day, hour), (month, day_of_month) = hour_place(self.ended_ms), day_place(self.ended_ms)
        places = [
            keys.open_requests(self.tenant), keys.leases(self.tenant), keys.progress(self.tenant), keys.usage_rows(self.tenant),
            keys.usage(self.tenant), keys.usage_hours(self.tenant, day), keys.usage_days(self.tenant, month),
        ]  # fmt: skip
        arguments = [
            self.account_id, int(only_if_expired), pack(self.note.true_amounts(self.row)), *self._written(hour, day_of_month),
            keep_rows_s * 1000, KEEP_HOURS_S, KEEP_DAYS_S,
        ]  # fmt: skip
        return bool(await run_script(client, SETTLE, [*places, *self.charge_keys], arguments))

    def _written(self, hour: str, day: str) -> list[bytes]:
        if self.row is None:
            return [pack([])] * 4
        row = self.row
        sums = row.sums()
        totals = [(name, 1 if name == "requests" else getattr(row, name)) for name in TOTALS]
        return [
            pack(row.to_fields()),
            pack([part for pair in totals for part in pair]),
            pack([part for name, n in sums for part in (sum_field(hour, row.model, row.key, name), n)]),
            pack([part for name, n in sums for part in (sum_field(day, row.model, row.key, name), n)]),
        ]
