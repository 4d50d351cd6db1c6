"""GET /openapi.json: the API as a document, written from the tables that validation uses."""

from aiohttp import web

from gateway.admin import description
from gateway.intake import field_table as table
from gateway.intake.field_table import Boolean, Integer, Number, Row, Special, Text
from gateway.parts import PARTS
from gateway.routing import SESSION_HEADER
from gateway.schema_parts import COUNT, NULL_TEXT, TEXT, Schema, answer, array, closed_record, operation, record, ref
from gateway.settings import GatewaySettings
from protocol.routing import MAX_SESSION_LENGTH


async def openapi(request: web.Request) -> web.Response:
    """The document; it needs no key and names no model or tenant."""
    return web.json_response(document(request.app[PARTS].settings))


def document(settings: GatewaySettings) -> Schema:
    """OpenAPI 3.1 of the inference API with this gateway's limits, of usage, and of the admin API."""
    chat = _request(settings, table.CHAT, table.CHAT_UNSUPPORTED)
    text = _request(settings, (table.prompt(settings.max_prompts), *table.COMPLETION), table.COMPLETION_UNSUPPORTED)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluicegate",
            "version": "1",
            "description": "OpenAI-compatible text generation, and its administration.",
        },
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generation("Answer a conversation", "ChatRequest", "ChatCompletion")},
            "/v1/completions": {"post": _generation("Continue a text", "CompletionRequest", "Completion")},
            "/v1/models": {"get": operation("List models", answer("ModelList"))},
            "/v1/models/{model}": {"get": _one_model()},
            **description.paths(),
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"ChatRequest": chat, "CompletionRequest": text, **_answers(), **description.schemas()},
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


def _generation(summary: str, request: str, name: str) -> Schema:
    content = {"application/json": {"schema": ref(request)}}
    ok = answer(name)
    ok["content"]["text/event-stream"] = {"schema": record(data=TEXT)}
    session = {
        "name": SESSION_HEADER, "in": "header", "required": False,
        "description": "Requests of one session go to one worker while that has room.",
        "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_SESSION_LENGTH}}}$"},
    }  # fmt: skip
    body = {"required": True, "content": content}
    return {**operation(summary, ok), "parameters": [session], "requestBody": body}


def _one_model() -> Schema:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {**operation("Describe a model", answer("Model")), "parameters": [name]}


def _answers() -> Schema:
    usage = record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
    head: Schema = {"id": TEXT, "created": COUNT, "model": TEXT, "usage": usage}
    finish: Schema = {"enum": ["stop", "length"]}
    logprobs: Schema = {"type": ["object", "null"]}
    message = record(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"})
    chat = record(index=COUNT, message=message, logprobs=logprobs, finish_reason=finish)
    text = record(index=COUNT, text=TEXT, logprobs=logprobs, finish_reason=finish)
    error = closed_record(message=TEXT, type=TEXT, param=NULL_TEXT, code=NULL_TEXT)
    return {
        "ChatCompletion": record(object={"const": "chat.completion"}, choices=array(chat), **head),
        "Completion": record(object={"const": "text_completion"}, choices=array(text), **head),
        "Model": record(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT),
        "ModelList": record(object={"const": "list"}, data=array(ref("Model"))),
        "Error": closed_record(error=error),
    }
