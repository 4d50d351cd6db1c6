"""One row for each request that was admitted, and the sums over hours and days.

A row is an entry of the tenant's row stream; the sums are hashes whose fields are `slot|model|key|count`. Both are written by the script
that settles the request, so they always agree.
"""

from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Literal, get_args

from protocol.errors import DecodeError
from protocol.ids import ModelName, TenantId

# lost: its gateway died, and the row tells what that had last reported.
Outcome = Literal["completed", "cancelled", "failed", "lost"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Span = Literal["hour", "day"]

# What is summed, of a row or as a count of rows.
SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "queue_ms", "ttft_ms", "total_ms")
COUNTED = ("requests", *OUTCOMES)
SUMS = (*COUNTED, *SUMMED)
TOTALS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")

_SEPARATOR = "|"  # not allowed in the names of models and keys


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A request that has ended. Times are Redis' Unix milliseconds; `queue_ms` and `ttft_ms` are 0 if it didn't come so far.

    `code` says why a failed one failed. `samples` is n x prompts.
    """

    request: str
    tenant: TenantId
    key: str
    model: ModelName
    outcome: Outcome
    code: str
    samples: int
    started_ms: int
    ended_ms: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    queue_ms: int
    ttft_ms: int
    total_ms: int

    def to_fields(self) -> list[str]:
        """Names and values in turn, as the fields of a stream entry."""
        return [text for name in _ROW_NAMES for text in (name, str(getattr(self, name)))]

    def sums(self) -> list[tuple[str, int]]:
        """What this row adds to the sums of its hour and day."""
        amounts = [("requests", 1), (self.outcome, 1), *((name, getattr(self, name)) for name in SUMMED)]
        return [(name, amount) for name, amount in amounts if amount]


_ROW_NAMES = tuple(field.name for field in fields(UsageRow))
_ROW_NUMBERS = frozenset(field.name for field in fields(UsageRow) if field.type is int or field.type == "int")


def row_from_fields(entry: dict[bytes, bytes]) -> UsageRow:
    """The row of a stream entry; raises DecodeError."""
    texts = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in entry.items()}
    try:
        values = {name: int(texts[name]) if name in _ROW_NUMBERS else texts[name] for name in _ROW_NAMES}
    except (KeyError, ValueError):
        raise DecodeError("not a usage row") from None
    if values["outcome"] not in OUTCOMES:
        raise DecodeError("a usage row of unknown outcome")
    return UsageRow(**values)  # type: ignore[arg-type]  # checked above


def sum_field(slot: str, model: str, key: str, name: str) -> str:
    """The field of a sums hash."""
    return _SEPARATOR.join((slot, model, key, name))


def parse_sum_field(raw: bytes) -> tuple[str, str, str, str]:
    """(slot, model, key, name); raises DecodeError."""
    parts = raw.decode("utf-8", "replace").split(_SEPARATOR)
    if len(parts) != 4 or parts[3] not in SUMS:
        raise DecodeError("not a field of a sums hash")
    return parts[0], parts[1], parts[2], parts[3]


def hour_place(ms: int) -> tuple[str, str]:
    """Which hash, and which slot in it, holds the hour of a time: (day, hour)."""
    when = datetime.fromtimestamp(ms / 1000, timezone.utc)
    return when.strftime("%Y%m%d"), when.strftime("%H")


def day_place(ms: int) -> tuple[str, str]:
    """Which hash, and which slot in it, holds the day of a time: (month, day)."""
    when = datetime.fromtimestamp(ms / 1000, timezone.utc)
    return when.strftime("%Y%m"), when.strftime("%d")
