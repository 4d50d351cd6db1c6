"""Sealed records in Redis hashes: what an operator sets. Each change raises the revision and leaves an audit entry, in one step."""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog

from gateway.scripts import run_script
from protocol.account_scripts import CHANGE_RECORD, LOOK
from protocol.audit import MAX_AUDIT_ENTRIES, AuditRecord, to_fields
from protocol.errors import ProtocolError
from protocol.key_space import KeySpace
from protocol.tenancy import open_record, record_key, seal_record

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A stored record and its bytes, for a change that must not overwrite another's."""

    raw: bytes
    record: Any


class Records:
    """Reads and writes through one Redis client; errors of the client pass through."""

    def __init__(self, client: Any, keys: KeySpace, pepper: bytes) -> None:
        self.client = client
        self.keys = keys
        self._key = record_key(pepper)

    async def get(self, place: str, field: str, kind: type[T]) -> T | None:
        """The record of a field. One that is not ours counts as none: it opens no door."""
        found = await self.find(place, field, kind)
        return None if found is None else found.record

    async def find(self, place: str, field: str, kind: type[T]) -> Found | None:
        """The record of a field with its bytes."""
        raw = await self.client.hget(place, field)
        record = None if raw is None else self._opened(place, field, kind, raw)
        return None if record is None else Found(raw, record)

    async def all(self, place: str, kind: type[T]) -> dict[str, T]:
        """All records of a hash that are ours, by field."""
        rows = [(field.decode("utf-8", "replace"), raw) for field, raw in (await self.client.hgetall(place)).items()]
        opened = [(field, self._opened(place, field, kind, raw)) for field, raw in rows]
        return {field: record for field, record in opened if record is not None}

    async def add(self, place: str, field: str, record: object, audit: AuditRecord) -> bool:
        """Write a record if there is none of this field; whether it was written."""
        return await self._change(place, field, "absent", b"", self._sealed(place, field, record), "", audit)

    async def replace(self, place: str, field: str, old: bytes, record: object, audit: AuditRecord) -> bool:
        """Write a record if the old one is still there unchanged; whether it was written."""
        return await self._change(place, field, "same", old, self._sealed(place, field, record), "", audit)

    async def put(self, place: str, field: str, record: object, audit: AuditRecord) -> None:
        """Write a record, whatever was there."""
        await self._change(place, field, "any", b"", self._sealed(place, field, record), "", audit)

    async def remove(self, place: str, field: str, audit: AuditRecord, *, retire: str = "") -> bool:
        """Remove a record; whether there was one. `retire` is kept in the set of retired names."""
        return await self._change(place, field, "present", b"", b"", retire, audit)

    async def now_ms(self) -> int:
        """Redis' time."""
        _, now_ms = await run_script(self.client, LOOK, [self.keys.revision], [])
        return int(now_ms)

    def _sealed(self, place: str, field: str, record: object) -> bytes:
        return seal_record(self._key, f"{place}/{field}", record)

    def _opened(self, place: str, field: str, kind: type[T], raw: bytes) -> T | None:
        try:
            return open_record(self._key, f"{place}/{field}", kind, raw)
        except ProtocolError as error:
            _log.error("record_refused", place=place, reason=type(error).__name__)
            return None

    async def _change(
        self, place: str, field: str, mode: Literal["absent", "same", "present", "any"], expected: bytes, value: bytes,
        retire: str, audit: AuditRecord,
    ) -> bool:  # fmt: skip
        names = [part for pair in to_fields(audit).items() for part in pair]
        keys = [place, self.keys.revision, self.keys.audit, self.keys.revoked_keys]
        arguments = [field, mode, expected, value, retire, MAX_AUDIT_ENTRIES, *names]
        return bool(await run_script(self.client, CHANGE_RECORD, keys, arguments))
