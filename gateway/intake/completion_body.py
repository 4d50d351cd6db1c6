"""The body of POST /v1/completions."""

from dataclasses import dataclass
from typing import Any

from gateway.errors import bad_request
from gateway.intake import field_table as table
from gateway.intake.fields import Fields, checked_text

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this route

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """The parts that only text completions have."""

    prompts: list[Prompt]
    max_tokens: int | None
    logprobs: int | None
    echo: bool


def completion_body(fields: Fields, vocab_size: int, max_prompts: int) -> CompletionBody:
    """Check what is particular to text completions; raises ApiError."""
    fields.refuse(*table.COMPLETION_UNSUPPORTED)
    best_of = fields.integer(table.BEST_OF)
    if best_of is not None and best_of != (fields.integer(table.samples(table.MAX_TOKENS)) or 1):
        raise bad_request("'best_of' other than n is not supported.", "best_of", "unsupported_parameter")
    echo = fields.boolean(table.ECHO)
    max_tokens = fields.integer(table.completion_max_tokens(echo=echo))
    return CompletionBody(
        prompts=_prompts(fields, vocab_size, max_prompts),
        max_tokens=max_tokens,
        logprobs=fields.integer(table.LOGPROBS),
        echo=echo,
    )


def _prompts(fields: Fields, vocab_size: int, max_prompts: int) -> list[Prompt]:
    raw = fields.raw("prompt")
    if type(raw) is str:
        return [checked_text(raw, "prompt")]
    if not isinstance(raw, list) or not raw:
        raise fields.wrong("prompt", "a string, an array of strings, or token ids")
    if type(raw[0]) is int:
        return [_token_ids(raw, vocab_size, "prompt")]
    if len(raw) > max_prompts:
        raise bad_request(f"Invalid 'prompt': more than {max_prompts} prompts.", "prompt")
    return [_prompt(item, vocab_size, f"prompt[{index}]") for index, item in enumerate(raw)]


def _prompt(raw: Any, vocab_size: int, path: str) -> Prompt:
    if type(raw) is str:
        return checked_text(raw, path)
    if isinstance(raw, list):
        return _token_ids(raw, vocab_size, path)
    raise bad_request(f"Invalid '{path}': expected a string or an array of token ids.", path)


def _token_ids(raw: list[Any], vocab_size: int, path: str) -> tuple[int, ...]:
    if set(map(type, raw)) - {int}:
        raise bad_request(f"Invalid '{path}': token ids must be integers.", path)
    if raw and not 0 <= min(raw) <= max(raw) < vocab_size:
        raise bad_request(f"Invalid '{path}': token ids must be 0 to {vocab_size - 1}.", path)
    return tuple(raw)
