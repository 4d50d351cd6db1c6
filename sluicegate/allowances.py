"""Limits, budgets and times as they are written on the command line."""

import re
from argparse import Namespace
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any

from gateway.tenancy_json import FieldError, budgets_of, limits_of, moment
from protocol.limits import Budget, Limits
from sluicegate.errors import CommandError

_BUDGET = re.compile(r"(day|month):(tokens|money)=([0-9]+(?:\.[0-9]+)?)")
_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d)")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_SPAN_S = 36_500 * 86_400


def limits_from(given: list[str], old: Limits) -> Limits:
    """The old limits with NAME=N set and NAME=none taken away; raises CommandError."""
    changes: dict[str, Any] = {}
    for pair in given:
        name, _, value = pair.partition("=")
        if value != "none" and not (value.isascii() and value.isdigit() and len(value) < 17):
            names = ", ".join(field.name for field in fields(Limits))
            raise CommandError(f"--limit: expected NAME=N or NAME=none, got {pair!r}; names: {names}")
        changes[name] = None if value == "none" else int(value)
    try:
        return limits_of(changes, old, "--limit")
    except FieldError as error:
        raise CommandError(str(error)) from None


def budgets_from(given: list[str]) -> tuple[Budget, ...]:
    """Budgets out of PERIOD:UNIT=AMOUNT; 'none' alone is no budget. Raises CommandError."""
    if given == ["none"]:
        return ()
    rows = []
    for text in given:
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise CommandError(f"--budget: expected day|month:tokens|money=AMOUNT, or none, got {text!r}")
        rows.append({"period": match[1], "unit": match[2], "amount": float(match[3])})
    try:
        return budgets_of(rows, "--budget")
    except FieldError as error:
        raise CommandError(str(error)) from None


def allowances_from(arguments: Namespace, old: Limits) -> dict[str, Any]:
    """The fields that --limit and --budget change; raises CommandError."""
    changes: dict[str, Any] = {}
    if arguments.limit:
        changes["limits"] = limits_from(arguments.limit, old)
    if arguments.budget:
        changes["budgets"] = budgets_from(arguments.budget)
    return changes


def pairs_from(flag: str, given: list[str]) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE pairs; raises CommandError."""
    pairs = [tuple(pair.partition("=")) for pair in given]
    if any(not name or not separator for name, separator, _ in pairs):
        raise CommandError(f"{flag}: expected NAME=VALUE")
    return tuple((name, value) for name, _, value in pairs)


def duration_ms(flag: str, text: str) -> int:
    """A time span such as 90s, 15m, 12h or 30d, of a century at most; raises CommandError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise CommandError(f"{flag}: expected a time such as 90s, 15m, 12h or 30d, got {text!r}")
    span_s = int(match[1]) * _UNITS_S[match[2]]
    if span_s > MAX_SPAN_S:
        raise CommandError(f"{flag}: {text} is more than {MAX_SPAN_S // _UNITS_S['d']}d")
    return span_s * 1000


def moment_ms(flag: str, text: str, now_ms: int, *, is_past: bool) -> int:
    """A point in time: RFC 3339, or a span from now, back or ahead. Raises CommandError."""
    if _DURATION.fullmatch(text):
        return now_ms - duration_ms(flag, text) if is_past else now_ms + duration_ms(flag, text)
    try:
        return moment(text, flag)
    except FieldError as error:
        raise CommandError(f"{error}, or a span such as 30d") from None


def shown_time(ms: int | None) -> str:
    """A time as tables show it, in UTC."""
    return "-" if ms is None else datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M")
