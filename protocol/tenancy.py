"""Tenants, their API keys and share groups as they are stored.

A key itself is shown once and stored nowhere: only its keyed digest is. Each record carries a code over its place and its content, made
with the installation's pepper, so that somebody who can write to Redis can't make a key another tenant's, or lift a limit.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Literal, TypeVar

from protocol.codec import decode, encode, pack, unpack_list
from protocol.errors import DecodeError, InvalidNameError, SignatureError
from protocol.ids import TenantId
from protocol.limits import UNLIMITED, Budget, Limits

Scope = Literal["inference", "usage", "admin"]
Status = Literal["active", "disabled"]
SCOPES: tuple[Scope, ...] = ("inference", "usage", "admin")
KEY_PREFIX = "sk-sg-"
MAX_METADATA = 64
MAX_TEXT = 512
MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0
_KEY = re.compile(r"[\x21-\x7e]{8,256}")
SHARE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_SHARE = re.compile(SHARE_PATTERN)
# A space can't be part of a key, so this message can't be one that `key_digest` signs.
_RECORD_PURPOSE = b"sluicegate/v1 stored record"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the platform, the unit of isolation. `models` None allows all models; `weight` is its share when there is a queue."""

    id: TenantId
    display_name: str
    created_ms: int
    status: Status = "active"
    weight: float = 1.0
    models: tuple[str, ...] | None = None
    limits: Limits = UNLIMITED
    budgets: tuple[Budget, ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"the weight must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        check_budgets(self.budgets)
        if len(self.metadata) > MAX_METADATA or len(dict(self.metadata)) != len(self.metadata):
            raise ValueError(f"metadata may have at most {MAX_METADATA} different names")
        for text in (self.display_name, *(part for pair in self.metadata for part in pair), *(self.models or ())):
            if len(text) > MAX_TEXT:
                raise ValueError(f"names and metadata may have at most {MAX_TEXT} characters each")

    def may_use(self, model: str) -> bool:
        """Whether the tenant is allowed a model."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key: `id` is its public name (safe to print), `tenant` whom it speaks for. Without `expires_ms` it lives until revoked."""

    id: str
    tenant: TenantId
    name: str
    created_ms: int
    scopes: tuple[Scope, ...] = ("inference",)
    expires_ms: int | None = None
    limits: Limits = UNLIMITED
    budgets: tuple[Budget, ...] = ()

    def __post_init__(self) -> None:
        if not self.scopes or len(set(self.scopes)) != len(self.scopes):
            raise ValueError("a key needs at least one scope, and each once")
        if len(self.name) > MAX_TEXT:
            raise ValueError(f"a key's name may have at most {MAX_TEXT} characters")
        check_budgets(self.budgets)

    def is_expired(self, now_ms: int) -> bool:
        """Whether its time is over."""
        return self.expires_ms is not None and now_ms >= self.expires_ms


@dataclass(frozen=True, slots=True)
class ShareGroup:
    """Tenants that an operator lets share prefixes under a name."""

    name: str
    tenants: tuple[TenantId, ...]
    created_ms: int


def check_budgets(budgets: tuple[Budget, ...]) -> None:
    """Raises ValueError if two budgets are for the same period and unit."""
    kinds = [(budget.period, budget.unit) for budget in budgets]
    if len(set(kinds)) != len(kinds):
        raise ValueError("there can be one budget for each period and unit")


def parse_share_name(text: str) -> str:
    """Check a share group's name from outside; raises InvalidNameError."""
    if not _SHARE.fullmatch(text):
        raise InvalidNameError("share group", text, "1-64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
    return text


def new_api_key() -> str:
    """A fresh key with 256 bits of randomness."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_digest(pepper: bytes, key: str) -> str | None:
    """The hex digest under which a key is stored, HMAC-SHA256 with the installation's pepper; None if it cannot be a key."""
    if not _KEY.fullmatch(key):
        return None
    return hmac.digest(pepper, key.encode("ascii"), hashlib.sha256).hex()


def record_key(pepper: bytes) -> bytes:
    """The key for `seal_record` and `open_record`."""
    return hmac.digest(pepper, _RECORD_PURPOSE, hashlib.sha256)


def seal_record(key: bytes, place: str, record: object) -> bytes:
    """A record with its code. `place` names kind and field, so that a record counts only where it was written."""
    body = encode(record)
    return pack([body, _code(key, place, body)])


def open_record(key: bytes, place: str, kind: type[T], raw: bytes) -> T:
    """The record behind `seal_record`; raises SignatureError or DecodeError."""
    parts = unpack_list(raw)
    if len(parts) != 2 or not all(isinstance(part, bytes) for part in parts):
        raise DecodeError("not a sealed record")
    body, code = parts
    if not hmac.compare_digest(_code(key, place, body), code):
        raise SignatureError("the stored record was not written by this installation")
    return decode(kind, body)


def _code(key: bytes, place: str, body: bytes) -> bytes:
    return hmac.digest(key, pack([place, body]), hashlib.sha256)
