"""`sluicegate usage` and `sluicegate audit`."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admin.reports import audit_json
from gateway.audit_log import AuditLog
from gateway.tenancy_json import FieldError
from gateway.usage_store import UsageStore
from gateway.usage_view import Selection, as_csv, records, totals
from sluicegate.allowances import moment_ms
from sluicegate.errors import CommandError
from sluicegate.redis_access import Stores, tenant_id, with_stores

AUDIT_COLUMNS = ("at", "kind", "actor", "tenant", "key", "request", "model", "page", "layer", "detail")


def usage(arguments: Namespace) -> None:
    """Print usage by hour, day or request."""
    wanted = _selection(arguments)
    only = None if arguments.tenant is None else tenant_id(arguments.tenant)

    async def work(stores: Stores) -> None:
        tenants = [tenant.id for tenant in await stores.tenants.tenants()] if only is None else [only]
        try:
            found = await records(UsageStore(stores.client, stores.keys), tenants, wanted)
        except FieldError as error:
            raise CommandError(str(error)) from None
        _print(arguments.format, wanted.columns, found, {"totals": totals(found)})

    with_stores(arguments, work)


def audit(arguments: Namespace) -> None:
    """Print the latest audit entries."""
    wanted = _selection(arguments)

    async def work(stores: Stores) -> None:
        log = AuditLog(stores.client, stores.keys)
        tenant = "" if arguments.tenant is None else tenant_id(arguments.tenant)
        entries = await log.entries(wanted.from_ms, wanted.to_ms, wanted.most, arguments.kind or "", tenant)
        shown = [audit_json(entry) for entry in entries]
        if arguments.format != "json":
            shown = [{column: row.get(column, "") for column in AUDIT_COLUMNS} for row in shown]
        _print(arguments.format, AUDIT_COLUMNS, shown, {})

    with_stores(arguments, work)


def _selection(arguments: Namespace) -> Selection:
    now_ms = time.time_ns() // 1_000_000
    given = {"limit": str(arguments.limit), "by": getattr(arguments, "by", "day")}
    for flag, text in (("from", arguments.since), ("to", arguments.until)):
        if text:
            given[flag] = _seconds_text(
                moment_ms(f"--{'since' if flag == 'from' else 'until'}", text, now_ms, is_past=True)
            )
    try:
        return Selection.parse(given, now_ms)
    except FieldError as error:
        raise CommandError(str(error)) from None


def _seconds_text(ms: int) -> str:
    return str(ms // 1000)


def _print(form: str, columns: Sequence[str], found: Sequence[Mapping[str, Any]], more: dict[str, Any]) -> None:
    if form == "json":
        print(json.dumps({"data": found, **more}, indent=2, ensure_ascii=False))
    elif form == "csv":
        sys.stdout.write(as_csv(columns, found))
    else:
        _print_table(columns, found)


def _print_table(columns: Sequence[str], found: Sequence[Mapping[str, Any]]) -> None:
    rows = [[_cell(record[column]) for column in columns] for record in found]
    widths = [max([len(column), *(len(row[place]) for row in rows)]) for place, column in enumerate(columns)]
    numeric = [bool(found) and all(type(record[column]) in (int, float) for record in found) for column in columns]
    for row in [[column.upper() for column in columns], *rows]:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)
