"""Tenants, keys, limits and prices as JSON or TOML values: what the admin API and seed files take and give. Money is a decimal number."""

import re
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from typing import Any, get_args

from gateway.intake.fields import is_finite
from protocol.ids import parse_model_name
from protocol.limits import (
    MAX_AMOUNT,
    NANOS,
    Budget,
    BudgetUnit,
    Limits,
    Period,
    Price,
    money_to_nanos,
    nanos_to_price,
    price_to_nanos,
)
from protocol.tenancy import MAX_TEXT, SCOPES, ApiKey, ShareGroup, Tenant, check_budgets

_LIMIT_NAMES = tuple(field.name for field in fields(Limits))
_STATUSES = ("active", "disabled")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class FieldError(ValueError):
    """A value that can't be; `path` names the field."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


def tenant_changes(value: Any, old: Tenant | None, path: str = "") -> dict[str, Any]:
    """Fields of a Tenant in an object; limits are merged into the old ones. Raises FieldError."""
    given = known(value, path, {"display_name", "status", "weight", "models", "limits", "budgets", "metadata"})
    changes: dict[str, Any] = {}
    if "display_name" in given:
        changes["display_name"] = text(given["display_name"], _at(path, "display_name"))
    if "status" in given:
        if given["status"] not in _STATUSES:
            raise FieldError(_at(path, "status"), f"must be one of {', '.join(_STATUSES)}")
        changes["status"] = given["status"]
    if "weight" in given:
        changes["weight"] = number(given["weight"], _at(path, "weight"))
    if "models" in given:
        changes["models"] = None if given["models"] is None else _models(given["models"], _at(path, "models"))
    if "metadata" in given:
        changes["metadata"] = _metadata(given["metadata"], _at(path, "metadata"))
    changes |= _allowances(given, old, path)
    return changes


def key_changes(value: Any, old: ApiKey | None, path: str = "", more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields of an ApiKey in an object; limits are merged into the old ones, names in `more` are left out. Raises FieldError."""
    given = known(value, path, {"name", "scopes", "expires", "limits", "budgets"} | more)
    changes: dict[str, Any] = {}
    if "name" in given:
        changes["name"] = text(given["name"], _at(path, "name"))
    if "scopes" in given:
        scopes = given["scopes"]
        if not isinstance(scopes, list) or not scopes or any(scope not in SCOPES for scope in scopes):
            raise FieldError(_at(path, "scopes"), f"expected an array of {', '.join(SCOPES)}")
        changes["scopes"] = tuple(dict.fromkeys(scopes))
    if "expires" in given:
        changes["expires_ms"] = None if given["expires"] is None else moment(given["expires"], _at(path, "expires"))
    changes |= _allowances(given, old, path)
    return changes


def price_of(value: Any, path: str = "") -> Price:
    """A Price from money for a million tokens: input, output, and cached_input (by default half of input). Raises FieldError."""
    given = known(value, path, {"input", "cached_input", "output"})
    for name in ("input", "output"):
        if name not in given:
            raise FieldError(_at(path, name), "is missing")
    paid = {name: number(given[name], _at(path, name)) for name in given}
    paid.setdefault("cached_input", paid["input"] / 2)
    for name, amount in paid.items():
        if not 0 <= amount <= 1_000_000:
            raise FieldError(_at(path, name), "must be 0 to 1000000 for a million tokens")
    return Price(*(price_to_nanos(paid[name]) for name in ("input", "cached_input", "output")))


def limits_of(value: Any, old: Limits, path: str) -> Limits:
    """Limits with what an object changes; a null takes a limit away. Raises FieldError."""
    if value is None:
        return Limits()
    given = known(value, path, set(_LIMIT_NAMES))
    for name, amount in given.items():
        if amount is not None and (type(amount) is not int or not 1 <= amount <= MAX_AMOUNT):
            raise FieldError(_at(path, name), f"must be a whole number from 1 to {MAX_AMOUNT}")
    return replace(old, **given)


def budgets_of(value: Any, path: str) -> tuple[Budget, ...]:
    """All budgets in an array of {period, unit, amount}. Raises FieldError."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise FieldError(path, "expected an array")
    budgets = tuple(_budget(row, f"{path}[{index}]") for index, row in enumerate(value))
    try:
        check_budgets(budgets)
    except ValueError as error:
        raise FieldError(path, str(error)) from None
    return budgets


def tenant_json(tenant: Tenant) -> dict[str, Any]:
    """A tenant as it is shown."""
    return {
        "object": "tenant", "id": tenant.id, "display_name": tenant.display_name, "status": tenant.status,
        "created": moment_text(tenant.created_ms), "weight": tenant.weight,
        "models": None if tenant.models is None else list(tenant.models), **_allowances_json(tenant),
        "metadata": dict(tenant.metadata),
    }  # fmt: skip


def key_json(key: ApiKey, last_used_ms: int | None) -> dict[str, Any]:
    """A key as it is shown: never the secret."""
    return {
        "object": "key", "id": key.id, "tenant": key.tenant, "name": key.name, "scopes": list(key.scopes),
        "created": moment_text(key.created_ms), "expires": None if key.expires_ms is None else moment_text(key.expires_ms),
        "last_used": None if last_used_ms is None else moment_text(last_used_ms), **_allowances_json(key),
    }  # fmt: skip


def price_json(model: str, price: Price) -> dict[str, Any]:
    """A price as it is shown, in money for a million tokens."""
    return {"object": "price", "model": model, **{name: nanos_to_price(nanos) for name, nanos in asdict(price).items()}}


def share_json(group: ShareGroup) -> dict[str, Any]:
    """A share group as it is shown."""
    return {
        "object": "share", "name": group.name, "tenants": list(group.tenants), "created": moment_text(group.created_ms),
    }  # fmt: skip


def moment(value: Any, path: str) -> int:
    """Unix milliseconds of an RFC 3339 time (without a zone: UTC), a TOML date-time, or Unix seconds. Raises FieldError."""
    if type(value) in (int, float) and is_finite(value):
        return _in_range(value * 1000, path)
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (ValueError, TypeError):
        raise FieldError(path, "expected a time such as 2027-01-31T00:00:00Z, or Unix seconds") from None
    try:
        stamp = (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        raise FieldError(path, "is out of range") from None
    return _in_range(round(stamp * 1000), path)


def moment_text(ms: int) -> str:
    """A time as RFC 3339."""
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def known(value: Any, path: str, names: set[str]) -> dict[str, Any]:
    """An object without other names; raises FieldError."""
    if not isinstance(value, dict):
        raise FieldError(path, "expected an object")
    for name in value:
        if name not in names:
            raise FieldError(_at(path, str(name)[:64]), f"is unknown; there are {', '.join(sorted(names))}")
    return value


def text(value: Any, path: str) -> str:
    """A short line of text; raises FieldError."""
    if type(value) is not str or len(value) > MAX_TEXT or _CONTROL.search(value) or not _is_encodable(value):
        raise FieldError(path, f"expected a line of at most {MAX_TEXT} characters")
    return value


def number(value: Any, path: str) -> float:
    """A finite number; raises FieldError."""
    if type(value) not in (int, float) or not is_finite(value):
        raise FieldError(path, "expected a number")
    return float(value)


def _allowances(given: dict[str, Any], old: Tenant | ApiKey | None, path: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if "limits" in given:
        before = old.limits if old is not None else Limits()
        changes["limits"] = limits_of(given["limits"], before, _at(path, "limits"))
    if "budgets" in given:
        changes["budgets"] = budgets_of(given["budgets"], _at(path, "budgets"))
    return changes


def _allowances_json(owner: Tenant | ApiKey) -> dict[str, Any]:
    budgets = [
        {"period": b.period, "unit": b.unit, "amount": b.amount if b.unit == "tokens" else b.amount / NANOS}
        for b in owner.budgets
    ]
    return {"limits": asdict(owner.limits), "budgets": budgets}


def _budget(value: Any, path: str) -> Budget:
    given = known(value, path, {"period", "unit", "amount"})
    period: Any = given.get("period")
    unit: Any = given.get("unit")
    if period not in get_args(Period):
        raise FieldError(_at(path, "period"), "must be day or month")
    if unit not in get_args(BudgetUnit):
        raise FieldError(_at(path, "unit"), "must be tokens or money")
    amount = number(given.get("amount"), _at(path, "amount"))
    if amount > MAX_AMOUNT:  # before it is multiplied: a float beyond this has no whole number of nano-units
        raise FieldError(_at(path, "amount"), f"must be at most {MAX_AMOUNT}")
    try:
        return Budget(period, unit, money_to_nanos(amount) if unit == "money" else _whole(amount))
    except ValueError as error:
        raise FieldError(_at(path, "amount"), str(error)) from None


def _whole(amount: float) -> int:
    if amount != int(amount):
        raise ValueError("tokens are counted whole")
    return int(amount)


def _models(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or any(type(name) is not str for name in value):
        raise FieldError(path, "expected an array of model names, or null for all")
    try:
        return tuple(dict.fromkeys(parse_model_name(name) for name in value))
    except ValueError as error:
        raise FieldError(path, str(error)) from None


def _metadata(value: Any, path: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise FieldError(path, "expected an object of texts")
    return tuple((text(name, path), text(entry, _at(path, name))) for name, entry in value.items())


def _in_range(ms: float, path: str) -> int:
    if not 0 <= ms < 253_402_300_800_000:  # the year 10000
        raise FieldError(path, "is out of range")
    return int(ms)


def _is_encodable(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
