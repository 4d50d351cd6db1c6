"""Chat templates, in jinja2's immutable sandbox: no loader, no attributes, no mutation. Time is bounded by the process that runs this."""

import json
from datetime import datetime, timezone
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import bad_request, unavailable

MAX_RENDERED_CHARACTERS = 64 * 1024 * 1024


class TemplateRefusal(Exception):
    """A template's own `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message)[:500])


def _strftime_now(format_: str) -> str:
    return datetime.now(timezone.utc).strftime(str(format_)[:100])


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=jinja2.Undefined
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        # Templates written for transformers may test `tools is not none`, where an undefined name would pass.
        self._special = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise unavailable(f"The model's chat template is not valid: {type(error).__name__}.") from None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt; raises ApiError if the template refuses the messages or fails."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(messages=messages, add_generation_prompt=True, **self._special):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARACTERS:
                    raise bad_request("The prompt becomes too long when the chat template is applied.", "messages")
        except TemplateRefusal as refusal:
            raise bad_request(f"The model's chat template refuses these messages: {refusal}", "messages") from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ):
            raise bad_request("The model's chat template cannot render these messages.", "messages") from None
        return "".join(parts)
