"""Pieces of an OpenAPI document: operations with the errors that all routes may have, references, records."""

from typing import Any

Schema = dict[str, Any]

STATUSES = {
    400: "A field or the request itself is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The API key may not do this.",
    404: "There is no such thing or route.",
    405: "The route takes another method.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not uncompressed JSON.",
    417: "The expectation cannot be met.",
    429: "A limit is reached or a queue is full; Retry-After says when to try again.",
    431: "The headers are too large.",
    500: "The server had an error.",
    503: "Nobody can serve this now; Retry-After says when to try again.",
    504: "The request's time limit has passed.",
}
TEXT: Schema = {"type": "string"}
NULL_TEXT: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}


def operation(summary: str, ok: Schema, *, status: int = 200) -> Schema:
    """A route's method, which answers with `ok` or an error."""
    errors = {str(code): {**answer("Error"), "description": text} for code, text in STATUSES.items()}
    return {"summary": summary, "responses": {str(status): ok, **errors}}


def answer(name: str) -> Schema:
    """A JSON answer of a named schema."""
    return {"description": "OK", "content": {"application/json": {"schema": ref(name)}}}


def ref(name: str) -> Schema:
    """The schema of that name."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(**properties: Schema) -> Schema:
    """An object that has all these properties, and maybe others."""
    return {"type": "object", "required": list(properties), "properties": properties}


def closed_record(**properties: Schema) -> Schema:
    """An object that has all these properties and no others."""
    return {**record(**properties), "additionalProperties": False}


def array(item: Schema) -> Schema:
    """Any number of items."""
    return {"type": "array", "items": item}
