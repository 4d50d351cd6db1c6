"""GET /openapi.json: the API as a document, written from the tables that validation uses."""

from typing import Any

from aiohttp import web

from gateway.intake import field_table as table
from gateway.intake.field_table import Boolean, Integer, Number, Row, Special, Text
from gateway.parts import PARTS
from gateway.routing import SESSION_HEADER
from gateway.settings import GatewaySettings
from protocol.routing import MAX_SESSION_LENGTH

Schema = dict[str, Any]

_STATUSES = {
    400: "A field or the request itself is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The API key may not do this.",
    404: "There is no such model or route.",
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
_TEXT: Schema = {"type": "string"}
_NULL_TEXT: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}


async def openapi(request: web.Request) -> web.Response:
    """The document; it needs no key and names no model or tenant."""
    return web.json_response(document(request.app[PARTS].settings))


def document(settings: GatewaySettings) -> Schema:
    """OpenAPI 3.1 of the inference API with this gateway's limits."""
    chat = _request(settings, table.CHAT, table.CHAT_UNSUPPORTED)
    text = _request(settings, (table.prompt(settings.max_prompts), *table.COMPLETION), table.COMPLETION_UNSUPPORTED)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluicegate", "version": "1", "description": "OpenAI-compatible text generation."},
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generation("Answer a conversation", "ChatRequest", "ChatCompletion")},
            "/v1/completions": {"post": _generation("Continue a text", "CompletionRequest", "Completion")},
            "/v1/models": {"get": _operation("List models", _json("ModelList"))},
            "/v1/models/{model}": {"get": _one_model()},
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"ChatRequest": chat, "CompletionRequest": text, **_answers()},
        },
    }


def _request(settings: GatewaySettings, rows: tuple[Row, ...], unsupported: tuple[str, ...]) -> Schema:
    limited = (table.samples(settings.max_choices), table.time_limit(settings.max_request_timeout_s))
    every: tuple[Row, ...] = (table.MODEL, *rows, *table.SAMPLING, *limited)
    properties = {row.name: row_schema(row) for row in every}
    for name in unsupported:
        properties[name] = {"enum": [None, False, []], "description": "Not supported."}
    required = ["model", *(row.name for row in every if isinstance(row, Special) and row.is_required)]
    return {"type": "object", "required": required, "properties": properties}


def row_schema(row: Row) -> Schema:
    """A row's JSON schema. null means absent, but for what a request must have."""
    schema: Schema
    if isinstance(row, Number):
        low = "exclusiveMinimum" if row.open_low else "minimum"
        schema = {"type": ["number", "null"], low: row.low, "maximum": row.high, "default": row.default}
    elif isinstance(row, Integer):
        schema = {"type": ["integer", "null"], "minimum": row.low, "maximum": row.high}
    elif isinstance(row, Boolean):
        schema = {"type": ["boolean", "null"], "default": False}
    elif isinstance(row, Text):
        is_model = row is table.MODEL
        schema = {"type": "string" if is_model else ["string", "null"], "maxLength": row.max_length}
    else:
        schema = row.schema if row.is_required else {"anyOf": [row.schema, {"type": "null"}]}
    return {**schema, "description": row.text} if row.text else schema


def _generation(summary: str, request: str, answer: str) -> Schema:
    content = {"application/json": {"schema": _ref(request)}}
    ok = _json(answer)
    ok["content"]["text/event-stream"] = {"schema": _object(data=_TEXT)}
    session = {
        "name": SESSION_HEADER, "in": "header", "required": False,
        "description": "Requests of one session go to one worker while that has room.",
        "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_SESSION_LENGTH}}}$"},
    }  # fmt: skip
    body = {"required": True, "content": content}
    return {**_operation(summary, ok), "parameters": [session], "requestBody": body}


def _one_model() -> Schema:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {**_operation("Describe a model", _json("Model")), "parameters": [name]}


def _operation(summary: str, ok: Schema) -> Schema:
    errors = {str(status): {**_json("Error"), "description": text} for status, text in _STATUSES.items()}
    return {"summary": summary, "responses": {"200": ok, **errors}}


def _json(name: str) -> Schema:
    return {"description": "OK", "content": {"application/json": {"schema": _ref(name)}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(*, closed: bool = False, **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "required": list(properties), "properties": properties}
    return {**schema, "additionalProperties": False} if closed else schema


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _answers() -> Schema:
    usage = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
    head: Schema = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "usage": usage}
    finish: Schema = {"enum": ["stop", "length"]}
    logprobs: Schema = {"type": ["object", "null"]}
    message = _object(role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"})
    chat = _object(index=_COUNT, message=message, logprobs=logprobs, finish_reason=finish)
    text = _object(index=_COUNT, text=_TEXT, logprobs=logprobs, finish_reason=finish)
    error = _object(closed=True, message=_TEXT, type=_TEXT, param=_NULL_TEXT, code=_NULL_TEXT)
    return {
        "ChatCompletion": _object(object={"const": "chat.completion"}, choices=_list(chat), **head),
        "Completion": _object(object={"const": "text_completion"}, choices=_list(text), **head),
        "Model": _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT),
        "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Error": _object(closed=True, error=error),
    }
