"""Tenants and their API keys as they are stored. A key itself is shown once and stored nowhere: only its keyed digest is."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Literal

from protocol.ids import TenantId

Role = Literal["inference", "admin"]
KEY_PREFIX = "sk-sg-"
_KEY = re.compile(r"[\x21-\x7e]{8,256}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the platform, the unit of isolation."""

    id: TenantId
    display_name: str
    created_ms: int


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key: `id` is its public name (safe to print), `tenant` whom it speaks for."""

    id: str
    tenant: TenantId
    name: str
    created_ms: int
    role: Role = "inference"


def new_api_key() -> str:
    """A fresh key with 256 bits of randomness."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_digest(pepper: bytes, key: str) -> str | None:
    """The hex digest under which a key is stored, HMAC-SHA256 with the installation's pepper; None if it cannot be a key."""
    if not _KEY.fullmatch(key):
        return None
    return hmac.digest(pepper, key.encode("ascii"), hashlib.sha256).hex()
