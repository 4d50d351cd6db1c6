"""The body of POST /v1/chat/completions."""

from dataclasses import dataclass
from typing import Any

from gateway.errors import bad_request
from gateway.intake import field_table as table
from gateway.intake.field_table import MAX_MESSAGES, ROLES
from gateway.intake.fields import Fields, checked_text

_ROLE = table.Text("role", 32, "Who speaks.")


@dataclass(frozen=True, slots=True)
class ChatBody:
    """The parts that only chat has."""

    messages: list[dict[str, str]]
    max_tokens: int | None
    logprobs: int | None


def chat_body(fields: Fields) -> ChatBody:
    """Check what is particular to chat; raises ApiError."""
    fields.refuse(*table.CHAT_UNSUPPORTED)
    if fields.has("tool_choice") and fields.raw("tool_choice") not in ("none", "auto"):
        raise bad_request("'tool_choice' is not supported.", "tool_choice", "unsupported_parameter")
    _refuse_formats(fields)
    return ChatBody(_messages(fields), max_tokens_of(fields), _logprobs(fields))


def max_tokens_of(fields: Fields) -> int | None:
    """max_completion_tokens, or max_tokens as it was called before. If both are given they must agree."""
    new = fields.integer(table.MAX_COMPLETION_TOKENS)
    old = fields.integer(table.CHAT_MAX_TOKENS)
    if new is not None and old is not None and new != old:
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens")
    return old if new is None else new


def _refuse_formats(fields: Fields) -> None:
    chosen = fields.raw("response_format")
    if chosen is not None and (not isinstance(chosen, dict) or chosen.get("type") != "text"):
        message = 'Only response_format {"type": "text"} is supported.'
        raise bad_request(message, "response_format", "unsupported_parameter")
    modalities = fields.raw("modalities")
    if modalities is not None and modalities != ["text"]:
        raise bad_request('Only modalities ["text"] is supported.', "modalities", "unsupported_parameter")


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean(table.CHAT_LOGPROBS)
    top = fields.integer(table.TOP_LOGPROBS)
    if top and not wanted:
        raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    return (top or 0) if wanted else None


def _messages(fields: Fields) -> list[dict[str, str]]:
    raw = fields.raw("messages")
    if not isinstance(raw, list) or not raw:
        raise fields.wrong("messages", "an array with one message at least")
    if len(raw) > MAX_MESSAGES:
        raise bad_request(f"Invalid 'messages': more than {MAX_MESSAGES} messages.", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(raw)]


def _message(raw: Any, path: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise bad_request(f"Invalid '{path}': expected an object.", path)
    fields = Fields(raw, path)
    role = fields.string(_ROLE)
    if role not in ROLES:
        raise bad_request(f"Invalid '{path}.role': must be one of {', '.join(ROLES)}.", f"{path}.role")
    fields.refuse("tool_calls", "function_call", "audio", "refusal")
    message = {"role": "system" if role == "developer" else role, "content": _content(fields, path)}
    name = fields.string(table.NAME)
    if name is not None:
        message["name"] = name
    return message


def _content(fields: Fields, path: str) -> str:
    """The text of a message: a string, or text parts joined."""
    raw = fields.raw("content")
    param = f"{path}.content"
    if type(raw) is str:
        return checked_text(raw, param)
    if not isinstance(raw, list) or not raw:
        # null goes with tool calls only, and those aren't supported.
        raise fields.wrong("content", "a string or an array of text parts")
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(raw))


def _part(raw: Any, path: str) -> str:
    if not isinstance(raw, dict):
        raise bad_request(f"Invalid '{path}': expected an object.", path)
    if raw.get("type") != "text":
        raise bad_request(f"Invalid '{path}': only parts of type 'text' are supported.", path)
    text = raw.get("text")
    if type(text) is not str:
        raise bad_request(f"Invalid '{path}.text': expected a string.", f"{path}.text")
    return checked_text(text, f"{path}.text")
