"""The audit stream: what was done to tenants, keys and shares, and what integrity checks found. Never a key, a prompt or a tag.

Whoever writes appends `to_fields(record)` to `KeySpace.audit` and nothing else; gateways, the command and workers do. An entry's time is
its id's, which is Redis' time.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from protocol.errors import DecodeError

AuditKind = Literal[
    "tenant.created", "tenant.changed", "tenant.disabled", "tenant.enabled", "tenant.deleted",
    "key.created", "key.changed", "key.rotated", "key.revoked",
    "price.set", "price.removed", "share.created", "share.changed", "share.deleted",
    "integrity.lease", "integrity.seal", "integrity.restore", "integrity.scrub",
]  # fmt: skip
MAX_DETAIL = 500
MAX_AUDIT_ENTRIES = 1_000_000  # older ones go first
_KINDS = frozenset(get_args(AuditKind))
_NUMBERS = ("page", "layer")


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One event. `actor` is who did it or saw it: `cli`, `admin`, a key's id, a worker's id.

    For integrity events `request` is the internal request id, `page` and `layer` the place; `detail` is a short word of which check, or
    which fields were changed, and holds no content.
    """

    kind: AuditKind
    actor: str
    tenant: str = ""
    key: str = ""
    request: str = ""
    model: str = ""
    page: int | None = None
    layer: int | None = None
    detail: str = ""


def to_fields(record: AuditRecord) -> dict[str, str]:
    """The fields of a stream entry; empty ones are left out."""
    texts = {
        name: getattr(record, name)[:MAX_DETAIL]
        for name in ("kind", "actor", "tenant", "key", "request", "model", "detail")
    }
    numbers = {name: str(getattr(record, name)) for name in _NUMBERS if getattr(record, name) is not None}
    return {**{name: text for name, text in texts.items() if text}, **numbers}


def from_fields(fields: dict[bytes, bytes]) -> AuditRecord:
    """The record of a stream entry; raises DecodeError. Fields of a newer writer are ignored: a record is only shown."""
    texts = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()}
    kind = texts.get("kind", "")
    if kind not in _KINDS:
        raise DecodeError("an audit entry of unknown kind")
    try:
        page, layer = (int(texts[name]) if name in texts else None for name in _NUMBERS)
    except ValueError:
        raise DecodeError("an audit entry's page or layer is no number") from None
    return AuditRecord(
        kind=kind,  # type: ignore[arg-type]  # checked above
        actor=texts.get("actor", ""), tenant=texts.get("tenant", ""), key=texts.get("key", ""),
        request=texts.get("request", ""), model=texts.get("model", ""), page=page, layer=layer,
        detail=texts.get("detail", ""),
    )  # fmt: skip
