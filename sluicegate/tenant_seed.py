"""`--tenants FILE`: a stack's tenants, keys, prices and share groups out of a TOML file, so that it can be made again.

What the file names is set at each start; what it doesn't name is left alone, and a key that was revoked stays revoked. A key's secret comes
from the file, from an environment variable or another file, or is made once and kept in the data folder.
"""

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.tenancy_json import FieldError, key_changes, known, price_of, tenant_changes
from gateway.tenant_store import ExistsError
from protocol.errors import ProtocolError
from protocol.ids import ModelName, TenantId, parse_model_name, parse_tenant_id
from protocol.limits import Price
from protocol.tenancy import ApiKey, Tenant, key_digest, new_api_key, parse_share_name
from sluicegate.errors import CommandError
from sluicegate.redis_access import Stores
from sluicegate.secrets import stored

MAX_FILE_BYTES = 4 * 1024 * 1024
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRETS = ("secret", "secret_env", "secret_file")


@dataclass(frozen=True, slots=True)
class SeedKey:
    """A key of a seed: where its secret comes from, and its fields."""

    name: str
    source: tuple[str, str] | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SeedTenant:
    """A tenant of a seed."""

    id: TenantId
    fields: dict[str, Any]
    keys: list[SeedKey]


@dataclass(frozen=True, slots=True)
class Seed:
    """A checked file."""

    tenants: list[SeedTenant]
    prices: dict[ModelName, Price]
    shares: dict[str, tuple[TenantId, ...]]


def read_seed(path: Path) -> Seed:
    """The file, checked as a whole; raises CommandError that names what is wrong."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise CommandError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
        return _seed(tomllib.loads(raw.decode("utf-8")))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise CommandError(f"{path}: not valid TOML: {error}") from None
    except (FieldError, ProtocolError) as error:
        raise CommandError(f"{path}: {error}") from None


async def apply_seed(stores: Stores, seed: Seed, data: Path) -> list[str]:
    """Make the stack as the file has it; returns a line for each change. Raises CommandError; errors of Redis pass through."""
    said: list[str] = []
    for model, price in seed.prices.items():
        await stores.prices.set(model, price)
    for tenant in seed.tenants:
        said += await _apply_tenant(stores, tenant)
        for key in tenant.keys:
            said += await _apply_key(stores, tenant.id, key, data)
    for name, members in seed.shares.items():
        said += await _apply_share(stores, name, members)
    return said


async def _apply_tenant(stores: Stores, seed: SeedTenant) -> list[str]:
    old = await stores.tenants.tenant(seed.id)
    if old is None:
        fields = {"display_name": seed.id, **seed.fields}
        await stores.tenants.create_tenant(seed.id, **fields)
        return [f"Created tenant {seed.id}."]
    changes = {name: value for name, value in seed.fields.items() if getattr(old, name) != value}
    if not changes:
        return []
    await stores.tenants.change_tenant(seed.id, **changes)
    return [f"Changed tenant {seed.id}: {', '.join(sorted(changes))}."]


async def _apply_key(stores: Stores, tenant: TenantId, seed: SeedKey, data: Path) -> list[str]:
    secret, place = _secret(tenant, seed, data)
    old = await stores.tenants.find_key(secret)
    if old is not None and old.tenant != tenant:
        raise CommandError(f"key {seed.name!r} of tenant {tenant}: this secret is a key of another tenant")
    if old is None and await stores.tenants.is_revoked(secret):
        return [f"Key {seed.name} of tenant {tenant} was revoked, and stays so."]
    if old is None:
        fields = dict(seed.fields)
        scopes = fields.pop("scopes", ())
        made = await stores.tenants.adopt_key(secret, tenant, seed.name, *scopes, **fields)
        return [f"Created key {made.id} ({seed.name}) of tenant {tenant}{place}."]
    changes = {name: value for name, value in seed.fields.items() if getattr(old, name) != value}
    if not changes:
        return []
    await stores.tenants.change_key(old.id, **changes)
    return [f"Changed key {old.id} ({seed.name}) of tenant {tenant}: {', '.join(sorted(changes))}."]


async def _apply_share(stores: Stores, name: str, members: tuple[TenantId, ...]) -> list[str]:
    old = next((group for group in await stores.shares.groups() if group.name == name), None)
    if old is not None and set(old.tenants) == set(members):
        return []
    if old is not None:
        await stores.shares.delete(name)
    try:
        await stores.shares.create(name, members)
    except ExistsError:
        return []  # somebody else has just made it
    return [f"{'Changed' if old else 'Created'} share group {name}."]


def _secret(tenant: TenantId, seed: SeedKey, data: Path) -> tuple[str, str]:
    """The key itself, and where it can be read if it was made here."""
    if seed.source is None:
        file = f"seed-{tenant}-{seed.name}.key"
        return stored(data, file, new_api_key), f" in {data / 'secrets' / file}"
    kind, value = seed.source
    if kind == "secret":
        secret = value
    elif kind == "secret_env":
        secret = os.environ.get(value, "")
    else:
        try:
            secret = Path(value).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise CommandError(f"key {seed.name!r} of tenant {tenant}: cannot read {value}") from None
    if key_digest(b"", secret) is None:
        raise CommandError(
            f"key {seed.name!r} of tenant {tenant}: {kind} must give 8 to 256 printable ASCII characters without spaces"
        )
    return secret, ""


def _seed(value: dict[str, Any]) -> Seed:
    known(value, "", {"tenants", "prices", "shares"})
    tenants = [_tenant(row, f"tenants[{index}]") for index, row in enumerate(_rows(value, "tenants"))]
    if len({tenant.id for tenant in tenants}) != len(tenants):
        raise FieldError("tenants", "each id may be there once")
    prices = value.get("prices", {})
    if not isinstance(prices, dict):
        raise FieldError("prices", "expected a table of models")
    shares = [_share(row, f"shares[{index}]") for index, row in enumerate(_rows(value, "shares"))]
    return Seed(
        tenants,
        {parse_model_name(model): price_of(row, f"prices.{model}") for model, row in prices.items()},
        dict(shares),
    )


def _tenant(value: Any, path: str) -> SeedTenant:
    if not isinstance(value, dict) or type(value.get("id")) is not str:
        raise FieldError(f"{path}.id", "expected a tenant id")
    fields = tenant_changes({name: entry for name, entry in value.items() if name not in ("id", "keys")}, None, path)
    tenant = parse_tenant_id(value["id"])
    try:
        Tenant(**{"id": tenant, "display_name": tenant, "created_ms": 0, **fields})
    except ValueError as error:
        raise FieldError(path, str(error)) from None
    keys = [_key(row, f"{path}.keys[{index}]") for index, row in enumerate(_rows(value, "keys", path))]
    if len({key.name for key in keys}) != len(keys):
        raise FieldError(f"{path}.keys", "each name may be there once")
    return SeedTenant(tenant, fields, keys)


def _key(value: Any, path: str) -> SeedKey:
    fields = key_changes(value, None, path, frozenset(_SECRETS))
    name = fields.pop("name", "")
    if not _FILE_NAME.fullmatch(name):
        raise FieldError(f"{path}.name", "expected 1 to 64 of A-Z a-z 0-9 . _ -")
    given = [(kind, value[kind]) for kind in _SECRETS if kind in value]
    if len(given) > 1 or any(type(source) is not str for _, source in given):
        raise FieldError(path, f"expected at most one of {', '.join(_SECRETS)}, as a text")
    try:
        ApiKey(**{"id": "x", "tenant": TenantId("x"), "name": name, "created_ms": 0, **fields})
    except ValueError as error:
        raise FieldError(path, str(error)) from None
    return SeedKey(name, given[0] if given else None, fields)


def _share(value: Any, path: str) -> tuple[str, tuple[TenantId, ...]]:
    given = known(value, path, {"name", "tenants"})
    name, tenants = given.get("name"), given.get("tenants")
    if type(name) is not str or not isinstance(tenants, list) or any(type(tenant) is not str for tenant in tenants):
        raise FieldError(path, "expected a name and an array of tenants")
    return parse_share_name(name), tuple(map(parse_tenant_id, tenants))


def _rows(value: dict[str, Any], name: str, path: str = "") -> list[Any]:
    rows = value.get(name, [])
    if not isinstance(rows, list):
        raise FieldError(f"{path}.{name}" if path else name, "expected an array of tables")
    return rows
