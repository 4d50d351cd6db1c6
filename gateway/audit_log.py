"""Reading the audit stream."""

from dataclasses import dataclass
from typing import Any

from protocol.audit import AuditRecord, from_fields
from protocol.errors import DecodeError
from protocol.key_space import KeySpace

BATCH = 1000


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A record with its place in the stream and its time."""

    id: str
    at_ms: int
    record: AuditRecord


class AuditLog:
    """Reads through one Redis client; errors of the client pass through."""

    def __init__(self, client: Any, keys: KeySpace) -> None:
        self._client = client
        self._key = keys.audit

    async def entries(self, from_ms: int, to_ms: int, most: int, kind: str = "", tenant: str = "") -> list[AuditEntry]:
        """The latest `most` entries of [from, to), in order of time. `kind` may be a whole kind or what's before its dot."""
        found: list[AuditEntry] = []
        last = f"{to_ms - 1}-{2**63 - 1}"
        while len(found) < most:
            rows = await self._client.xrevrange(self._key, max=last, min=from_ms, count=BATCH)
            found += [entry for entry in map(_entry, rows) if entry is not None and _is_wanted(entry, kind, tenant)]
            if len(rows) < BATCH:
                break
            last = "(" + rows[-1][0].decode()
        return found[:most][::-1]


def _entry(row: tuple[bytes, dict[bytes, bytes]]) -> AuditEntry | None:
    entry_id = row[0].decode()
    try:
        return AuditEntry(entry_id, int(entry_id.partition("-")[0]), from_fields(row[1]))
    except DecodeError:
        return None  # of another version


def _is_wanted(entry: AuditEntry, kind: str, tenant: str) -> bool:
    of_kind = not kind or entry.record.kind == kind or entry.record.kind.startswith(kind + ".")
    return of_kind and (not tenant or entry.record.tenant == tenant)
