"""Usage as it is shown: one selection and one form for the API and the command."""

import asyncio
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Literal, cast

from gateway.tenancy_json import FieldError, moment, moment_text
from gateway.usage_store import RangeTooLongError, UsageStore
from protocol.ids import TenantId
from protocol.limits import NANOS
from protocol.usage import SUMS, UsageRow

By = Literal["hour", "day", "request"]
DEFAULT_SPAN_MS = 30 * 86_400_000
MAX_ROWS = 10_000
DEFAULT_ROWS = 1000
ROW_COLUMNS = (
    "ended", "tenant", "key", "model", "outcome", "code", "samples", "prompt_tokens", "cached_tokens", "completion_tokens",
    "cost", "queue_ms", "ttft_ms", "total_ms", "request",
)  # fmt: skip
SUM_COLUMNS = ("start", "tenant", "key", "model", *(name for name in SUMS if name != "cost_nanos"), "cost")
_FIELDS = tuple(field.name for field in fields_of(UsageRow))
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which usage is wanted."""

    by: By
    from_ms: int
    to_ms: int
    most: int

    @classmethod
    def parse(cls, given: Mapping[str, str], now_ms: int) -> "Selection":
        """From texts: by, from, to, limit. Without any, the days of the last month. Raises FieldError."""
        by = given.get("by", "day")
        if by not in ("hour", "day", "request"):
            raise FieldError("by", "must be hour, day or request")
        to_ms = _when(given["to"], "to") if "to" in given else now_ms + 1000
        from_ms = _when(given["from"], "from") if "from" in given else max(to_ms - DEFAULT_SPAN_MS, 0)
        if from_ms >= to_ms:
            raise FieldError("from", "must be before 'to'")
        limit = given.get("limit", str(DEFAULT_ROWS))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MAX_ROWS):
            raise FieldError("limit", f"must be 1 to {MAX_ROWS}")
        return cls(cast("By", by), from_ms, to_ms, int(limit))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what `records` gives."""
        return ROW_COLUMNS if self.by == "request" else SUM_COLUMNS


async def records(store: UsageStore, tenants: list[TenantId], wanted: Selection) -> list[dict[str, Any]]:
    """Usage as flat objects with the selection's columns. Raises FieldError; errors of Redis pass through."""
    if wanted.by == "request":
        rows = [row for t in tenants for row in await store.rows(t, wanted.from_ms, wanted.to_ms, wanted.most)]
        return await asyncio.to_thread(_latest, rows, wanted.most)
    try:
        sums = await store.sums(tenants, wanted.by, wanted.from_ms, wanted.to_ms)
    except RangeTooLongError as error:
        raise FieldError("from", str(error)) from None
    return [
        {"start": moment_text(one.start_ms), "tenant": one.tenant, "key": one.key, "model": one.model, **_amounts(one.amounts)}
        for one in sums
    ]  # fmt: skip


def totals(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums over all records."""
    names = [name for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens") if found]
    sums: dict[str, Any] = {name: sum(record.get(name, 1) for record in found) for name in names}
    return {**sums, "cost": round(sum(record["cost"] for record in found), 9)}


def as_json(wanted: Selection, found: Sequence[Mapping[str, Any]]) -> str:
    """One object with all records and their totals. Each record by itself: other threads run in between."""
    head = json.dumps({"object": "list", "by": wanted.by})[:-1]
    return f'{head}, "data": [{", ".join([json.dumps(record) for record in found])}], "totals": {json.dumps(totals(found))}}}'


def as_csv(columns: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    """A header line and a line for each record. Texts that a spreadsheet would compute are quoted."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(columns)
    for record in found:
        writer.writerow([_cell(record[column]) for column in columns])
    return output.getvalue()


def _latest(rows: list[UsageRow], most: int) -> list[dict[str, Any]]:
    return [_row(row) for row in sorted(rows, key=lambda row: row.ended_ms)[-most:]]


def _row(row: UsageRow) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(row, name) for name in _FIELDS}
    fields["ended"] = moment_text(fields.pop("ended_ms"))
    fields["started"] = moment_text(fields.pop("started_ms"))
    fields["cost"] = fields.pop("cost_nanos") / NANOS
    return fields


def _amounts(amounts: dict[str, int]) -> dict[str, Any]:
    shown: dict[str, Any] = dict(amounts)
    shown["cost"] = shown.pop("cost_nanos") / NANOS
    return shown


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def _when(value: str, name: str) -> int:
    is_number = value.isascii() and value.isdigit() and len(value) < 13
    return moment(int(value) if is_number else value, name)
