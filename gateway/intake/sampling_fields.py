"""The sampling fields that chat and text completions share."""

import secrets
from dataclasses import replace

from gateway.errors import ApiError, bad_request
from gateway.intake import field_table as table
from gateway.intake.field_table import MAX_LOGIT_BIAS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_STOPS
from gateway.intake.fields import Fields, checked_text
from protocol.job import SamplingParams

_UNSET = -1


def sampling_params(fields: Fields, vocab_size: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """All but max_tokens where it's absent; `with_room` fills it in."""
    seed = fields.integer(table.SEED)
    min_tokens = fields.integer(table.MIN_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(f"Invalid 'min_tokens': {min_tokens} is more than max_tokens {max_tokens}.", "min_tokens")
    return SamplingParams(
        max_tokens=_UNSET if max_tokens is None else max_tokens,
        seed=secrets.randbits(63) if seed is None else seed,
        temperature=fields.number(table.TEMPERATURE),
        top_p=fields.number(table.TOP_P),
        top_k=_top_k(fields),
        min_p=fields.number(table.MIN_P),
        presence_penalty=fields.number(table.PRESENCE_PENALTY),
        frequency_penalty=fields.number(table.FREQUENCY_PENALTY),
        repetition_penalty=fields.number(table.REPETITION_PENALTY),
        logit_bias=_logit_bias(fields, vocab_size),
        stop=_stops(fields),
        stop_token_ids=_stop_token_ids(fields, vocab_size),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean(table.IGNORE_EOS),
        logprobs=logprobs,
    )


def with_room(sampling: SamplingParams, num_prompt: int, limit: int, param: str, default: int) -> SamplingParams:
    """Sampling for a prompt of `num_prompt` tokens where prompt and output together may be `limit`; raises ApiError if they can't.

    Where the client set no max_tokens it's `default`, or what still fits.
    """
    if num_prompt == 0:
        raise bad_request(f"Invalid '{param}': the prompt is empty.", param)
    wanted = sampling.max_tokens
    room = limit - num_prompt
    if room < 0 or (room == 0 and wanted != 0):
        raise _too_long(f"your prompt has {num_prompt} tokens", limit, param)
    if wanted == _UNSET:
        wanted = min(room, default)
    elif wanted > room:
        raise _too_long(f"your prompt has {num_prompt} tokens and you asked for {wanted} more", limit, param)
    if sampling.min_tokens > wanted:
        raise bad_request(f"Invalid 'min_tokens': {sampling.min_tokens} do not fit the context.", "min_tokens")
    return replace(sampling, max_tokens=wanted)


def with_output_limit(sampling: SamplingParams, most: int | None) -> SamplingParams:
    """The sampling as it is; raises ApiError if its max_tokens are more than the caller may ask for."""
    if most is not None and sampling.max_tokens > most:
        raise bad_request(
            f"Invalid 'max_tokens': you may ask for at most {most}, not {sampling.max_tokens}.", "max_tokens"
        )
    return sampling


def _too_long(what: str, limit: int, param: str) -> ApiError:
    message = f"This model's maximum context length is {limit} tokens; {what}."
    return bad_request(message, param, "context_length_exceeded")


def _top_k(fields: Fields) -> int:
    value = fields.integer(table.TOP_K)
    return 0 if value in (None, -1) else int(value or 0)


def _stops(fields: Fields) -> tuple[str, ...]:
    raw = fields.raw("stop")
    if raw is None:
        return ()
    values = [raw] if type(raw) is str else raw
    if not isinstance(values, list) or any(type(value) is not str for value in values):
        raise fields.wrong("stop", "a string or an array of strings")
    if len(values) > MAX_STOPS:
        raise bad_request(f"Invalid 'stop': at most {MAX_STOPS} stop strings are allowed.", "stop")
    for value in values:
        if not 1 <= len(value) <= MAX_STOP_CHARACTERS:
            raise bad_request(f"Invalid 'stop': each must have 1 to {MAX_STOP_CHARACTERS} characters.", "stop")
    return tuple(checked_text(value, "stop") for value in values)


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    raw = fields.raw("stop_token_ids")
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > MAX_STOP_TOKEN_IDS or any(type(value) is not int for value in raw):
        raise fields.wrong("stop_token_ids", f"an array of at most {MAX_STOP_TOKEN_IDS} integers")
    if any(not 0 <= value < vocab_size for value in raw):
        raise bad_request(f"Invalid 'stop_token_ids': ids must be 0 to {vocab_size - 1}.", "stop_token_ids")
    return tuple(raw)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    raw = fields.raw("logit_bias")
    if raw is None:
        return ()
    if not isinstance(raw, dict) or len(raw) > MAX_LOGIT_BIAS:
        raise fields.wrong("logit_bias", f"an object of at most {MAX_LOGIT_BIAS} token ids")
    biases = []
    inner = Fields(raw, "logit_bias")
    for key in raw:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(f"Invalid 'logit_bias': keys must be token ids, 0 to {vocab_size - 1}.", "logit_bias")
        biases.append((int(key), inner.number(table.Number(key, -100, 100, 0.0, ""))))
    return tuple(biases)
