"""The admin API and /v1/usage in OpenAPI's form, with the names and bounds that validation uses."""

from dataclasses import fields
from typing import get_args

from gateway.admin.keys import MAX_OVERLAP_S
from gateway.schema_parts import COUNT, NULL_TEXT, TEXT, Schema, answer, array, closed_record, operation, record, ref
from gateway.usage_view import MAX_ROWS
from protocol.ids import MODEL_PATTERN, TENANT_PATTERN
from protocol.limits import MAX_AMOUNT, BudgetUnit, Limits, Period
from protocol.tenancy import MAX_TEXT, MAX_WEIGHT, MIN_WEIGHT, SCOPES, SHARE_PATTERN

_LINE: Schema = {"type": "string", "maxLength": MAX_TEXT}
_NUMBER: Schema = {"type": "number"}
_TIME: Schema = {"type": ["string", "number"], "description": "RFC 3339, or Unix seconds."}
_TENANT: Schema = {"type": "string", "pattern": f"^{TENANT_PATTERN}$"}
_MODEL: Schema = {"type": "string", "pattern": f"^{MODEL_PATTERN}$"}
_SHARE: Schema = {"type": "string", "pattern": f"^{SHARE_PATTERN}$"}


def paths() -> Schema:
    """Every route under /admin/v1, and /v1/usage."""
    one_tenant, tenant_keys = "/admin/v1/tenants/{tenant}", "/admin/v1/tenants/{tenant}/keys"
    routes: dict[str, Schema] = {
        "/v1/usage": {"get": _usage("Your tenant's usage")},
        "/admin/v1/tenants": {"get": _listing("List tenants", "TenantList"), "post": _making("Add a tenant", "NewTenant", "Tenant")},
        one_tenant: {
            "get": operation("Describe a tenant", answer("Tenant")),
            "patch": _taking("Change the given fields of a tenant", "TenantChange", "Tenant"),
            "delete": operation("Remove a tenant, its keys and its pages", answer("Deleted")),
        },
        "/admin/v1/tenants/{tenant}/limits": {
            "get": _listing("What is used of a tenant's limits", "StandingList"),
            "put": _taking("Replace a tenant's limits", "Limits", "Tenant"),
        },
        tenant_keys: {
            "get": _listing("List a tenant's keys", "KeyList"),
            "post": _making("Make a key; its secret is shown this once", "KeyChange", "NewKey", is_required=False),
        },
        "/admin/v1/keys": {"get": _listing("List all keys", "KeyList")},
        "/admin/v1/keys/{key}": {
            "get": operation("Describe a key", answer("Key")),
            "patch": _taking("Change the given fields of a key", "KeyChange", "Key"),
            "delete": operation("Revoke a key", answer("Deleted")),
        },
        "/admin/v1/keys/{key}/rotate": {"post": _making("Make a key's successor", "Rotation", "NewKey", is_required=False)},
        "/admin/v1/prices": {"get": _listing("List prices", "PriceList")},
        "/admin/v1/prices/{model}": {
            "put": _taking("Set a model's price", "NewPrice", "Price"),
            "delete": operation("Make a model free", answer("Deleted")),
        },
        "/admin/v1/shares": {"get": _listing("List share groups", "ShareList"), "post": _making("Make a share group", "NewShare", "Share")},
        "/admin/v1/shares/{share}": {"delete": operation("Remove a share group", answer("Deleted"))},
        "/admin/v1/usage": {"get": _usage("Usage of all tenants", _query("tenant", _TENANT))},
        "/admin/v1/queue": {"get": _listing("What waits and runs", "QueueList")},
        "/admin/v1/workers": {"get": _listing("The live workers", "WorkerList")},
        "/admin/v1/audit": {"get": _audit()},
    }  # fmt: skip
    kinds = {"tenant": _TENANT, "key": {"type": "string", "minLength": 1}, "model": _MODEL, "share": _SHARE}
    for path, methods in routes.items():
        named = [_parameter(name, "path", schema) for name, schema in kinds.items() if f"{{{name}}}" in path]
        if named:
            methods["parameters"] = named
    return routes


def schemas() -> Schema:
    """What these routes take and answer."""
    limits, budget = _limits(), _budget()
    shown = {"created": TEXT, "limits": limits, "budgets": array(budget)}
    key = {
        "object": {"const": "key"},
        "id": TEXT,
        "tenant": TEXT,
        "name": TEXT,
        "scopes": _scopes(),
        "expires": NULL_TEXT,
        "last_used": NULL_TEXT,
        **shown,
    }
    tenant = record(
        object={"const": "tenant"}, id=TEXT, display_name=TEXT, status=_status(), weight=_NUMBER, models={"type": ["array", "null"], "items": TEXT},
        metadata={"type": "object", "additionalProperties": TEXT}, **shown,
    )  # fmt: skip
    share = record(object={"const": "share"}, name=TEXT, tenants=array(TEXT), created=TEXT)
    price = record(object={"const": "price"}, model=TEXT, input=_NUMBER, cached_input=_NUMBER, output=_NUMBER)
    queue = record(model=TEXT, workers=COUNT, waiting=COUNT, running=COUNT, dead=COUNT)
    audit = {**record(id=TEXT, at=TEXT, kind=TEXT, actor=TEXT), "additionalProperties": {"type": ["string", "integer"]}}
    usage = {
        **record(tenant=TEXT, key=TEXT, model=TEXT, cost=_NUMBER),
        "additionalProperties": {"type": ["string", "number"]},
    }
    return {
        "Limits": limits, "Tenant": tenant, "Key": record(**key), "NewKey": record(**key, secret=TEXT), "Share": share, "Price": price,
        "TenantChange": _changes(), "NewTenant": _new_tenant(), "KeyChange": _key_changes(), "Rotation": _rotation(),
        "NewPrice": _new_price(), "NewShare": closed_record(name=_SHARE, tenants=array(_TENANT)),
        "Deleted": record(object=TEXT, deleted={"const": True}),
        "TenantList": _list_of(ref("Tenant")), "KeyList": _list_of(ref("Key")), "ShareList": _list_of(ref("Share")), "PriceList": _list_of(ref("Price")),
        "StandingList": _list_of(_standing(), tenant=TEXT),
        "QueueList": _list_of(queue, tenants=array(record(tenant=TEXT, open_requests=COUNT))),
        "WorkerList": _list_of(record(worker_id=TEXT, model=TEXT, pages_total=COUNT, pages_free=COUNT, running_sequences=COUNT)),
        "AuditList": _list_of(audit),
        "UsageList": _list_of(usage, by={"enum": ["hour", "day", "request"]}, totals=record(cost=_NUMBER)),
    }  # fmt: skip


def _limits() -> Schema:
    amount: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_AMOUNT}
    return {
        "type": "object",
        "properties": {field.name: amount for field in fields(Limits)},
        "additionalProperties": False,
    }


def _budget() -> Schema:
    amount: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_AMOUNT}
    return closed_record(
        period={"enum": list(get_args(Period))}, unit={"enum": list(get_args(BudgetUnit))}, amount=amount
    )


def _status() -> Schema:
    return {"enum": ["active", "disabled"]}


def _scopes() -> Schema:
    return {"type": "array", "items": {"enum": list(SCOPES)}, "minItems": 1}


def _allowances() -> Schema:
    return {
        "limits": {"anyOf": [ref("Limits"), {"type": "null"}]},
        "budgets": {"type": ["array", "null"], "items": _budget()},
    }


def _changes() -> Schema:
    properties = {
        "display_name": _LINE,
        "status": _status(),
        "weight": {"type": "number", "minimum": MIN_WEIGHT, "maximum": MAX_WEIGHT},
        "models": {"type": ["array", "null"], "items": _MODEL},
        "metadata": {"type": "object", "additionalProperties": _LINE},
        **_allowances(),
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _new_tenant() -> Schema:
    changes = _changes()
    return {**changes, "required": ["id"], "properties": {"id": _TENANT, **changes["properties"]}}


def _key_changes() -> Schema:
    properties = {
        "name": _LINE,
        "scopes": _scopes(),
        "expires": {**_TIME, "type": ["string", "number", "null"]},
        **_allowances(),
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _rotation() -> Schema:
    overlap: Schema = {"type": "number", "minimum": 0, "maximum": MAX_OVERLAP_S, "default": 3600}
    return {"type": "object", "properties": {"overlap_s": overlap}, "additionalProperties": False}


def _new_price() -> Schema:
    money: Schema = {"type": "number", "minimum": 0, "maximum": 1_000_000, "description": "For a million tokens."}
    return {**closed_record(input=money, output=money, cached_input=money), "required": ["input", "output"]}


def _standing() -> Schema:
    return record(
        object={"const": "limit"}, owner=TEXT, key=NULL_TEXT, limit=TEXT, period=NULL_TEXT, allowed=_NUMBER, used=_NUMBER, remaining=_NUMBER,
        reset_s=_NUMBER,
    )  # fmt: skip


def _list_of(item: Schema, **more: Schema) -> Schema:
    return record(object={"const": "list"}, data=array(item), **more)


def _listing(summary: str, name: str) -> Schema:
    return operation(summary, answer(name))


def _body(name: str, *, is_required: bool) -> Schema:
    return {"requestBody": {"required": is_required, "content": {"application/json": {"schema": ref(name)}}}}


def _taking(summary: str, body: str, shown: str) -> Schema:
    return {**operation(summary, answer(shown)), **_body(body, is_required=True)}


def _making(summary: str, body: str, shown: str, *, is_required: bool = True) -> Schema:
    made = operation(summary, answer(shown), status=201)
    made["responses"]["409"] = {**answer("Error"), "description": "There is one of that name already."}
    return {**made, **_body(body, is_required=is_required)}


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _query(name: str, schema: Schema) -> Schema:
    return _parameter(name, "query", schema)


def _span() -> list[Schema]:
    limit: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_ROWS, "default": 1000}
    return [_query("from", _TIME), _query("to", _TIME), _query("limit", limit)]


def _usage(summary: str, *more: Schema) -> Schema:
    ok = answer("UsageList")
    ok["content"]["text/csv"] = {"schema": TEXT}
    by, form = {"enum": ["hour", "day", "request"], "default": "day"}, {"enum": ["json", "csv"], "default": "json"}
    return {**operation(summary, ok), "parameters": [_query("by", by), _query("format", form), *_span(), *more]}


def _audit() -> Schema:
    kind: Schema = {"type": "string", "description": "A whole kind, or what is before its dot."}
    return {
        **_listing("The latest events", "AuditList"),
        "parameters": [*_span(), _query("kind", kind), _query("tenant", TEXT)],
    }
