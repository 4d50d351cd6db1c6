"""Audit entries: the same form for what an operator does and for what a worker's integrity checks find."""

import pytest

from protocol.audit import AuditRecord, from_fields, to_fields
from protocol.errors import DecodeError

RECORDS = [
    AuditRecord("key.revoked", "cli", "acme", "key_1"),
    AuditRecord("integrity.seal", "worker-1", "acme", request="r1", model="m", page=0, layer=12, detail="seal"),
    AuditRecord("integrity.lease", "worker-1", "acme", request="r1", page=3),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_an_entry_comes_back_as_it_was(record: AuditRecord) -> None:
    """Page and layer 0 are not the same as none."""
    raw = {name.encode(): value.encode() for name, value in to_fields(record).items()}
    assert record == from_fields(raw)


def test_fields_of_a_newer_writer_are_ignored() -> None:
    """An entry is only shown."""
    assert "tenant.created" == from_fields({b"kind": b"tenant.created", b"mood": b"fine"}).kind


@pytest.mark.parametrize("raw", [{}, {b"kind": b"made.up"}, {b"kind": b"integrity.seal", b"page": b"x"}])
def test_what_is_no_entry(raw: dict[bytes, bytes]) -> None:
    """Unknown kinds and pages that are no numbers."""
    with pytest.raises(DecodeError):
        from_fields(raw)


def test_details_are_bounded() -> None:
    """Nothing long gets into the stream."""
    assert 500 == len(to_fields(AuditRecord("key.created", "cli", detail="x" * 5000))["detail"])
