"""Body, model and limits to a GenerationCall."""

from collections.abc import Callable
from typing import Any, Literal

from gateway.errors import bad_request, model_not_found
from gateway.intake import field_table as table
from gateway.intake.call import GenerationCall, IntakeLimits, ServedModel
from gateway.intake.chat_body import chat_body
from gateway.intake.completion_body import DEFAULT_MAX_TOKENS, completion_body
from gateway.intake.encoder import PromptEncoder
from gateway.intake.field_table import MAX_TOKENS
from gateway.intake.fields import Fields, parse_object
from gateway.intake.sampling_fields import sampling_params, with_output_limit, with_room
from protocol.job import SamplingParams
from protocol.key_space import PriorityClass

EncoderOf = Callable[[ServedModel], PromptEncoder]


def build_call(
    kind: Literal["chat", "completion"],
    body: bytes,
    models: dict[str, ServedModel],
    limits: IntakeLimits,
    encoder_of: EncoderOf,
) -> GenerationCall:
    """The checked call; raises ApiError."""
    fields = Fields(parse_object(body))
    model = _model(fields, models)
    encoder = encoder_of(model)
    n = fields.integer(table.samples(limits.max_choices)) or 1
    stream = fields.boolean(table.STREAM)
    if kind == "chat":
        chat = chat_body(fields)
        sampling = sampling_params(fields, encoder.vocab_size, chat.max_tokens, chat.logprobs)
        prompts = [encoder.chat(chat.messages)]
        params, echo, default = ["messages"], False, MAX_TOKENS
    else:
        completion = completion_body(fields, encoder.vocab_size, limits.max_prompts)
        sampling = sampling_params(fields, encoder.vocab_size, completion.max_tokens, completion.logprobs)
        prompts = [p if isinstance(p, tuple) else encoder.text(p) for p in completion.prompts]
        params, echo, default = ["prompt"] * len(prompts), completion.echo, DEFAULT_MAX_TOKENS
    return GenerationCall(
        kind=kind,
        model=model.name,
        prompts=tuple(prompts),
        samplings=_samplings(sampling, prompts, params, model, default),
        n=n,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        echo=echo,
        cache_salt=fields.string(table.CACHE_SALT),
        share_group=fields.string(table.SHARE_GROUP),
        timeout_s=_timeout(fields, limits),
        priority=_priority(fields),
    )


def _model(fields: Fields, models: dict[str, ServedModel]) -> ServedModel:
    name = fields.string(table.MODEL)
    if name is None:
        raise bad_request("'model' is missing.", "model")
    if name not in models:
        raise model_not_found(name)
    return models[name]


def _samplings(
    sampling: SamplingParams, prompts: list[tuple[int, ...]], params: list[str], model: ServedModel, default: int
) -> tuple[SamplingParams, ...]:
    bounded = with_output_limit(sampling, model.max_output_tokens)
    limit = model.max_request_tokens
    default = min(default, model.max_output_tokens or default)
    return tuple(with_room(bounded, len(p), limit, param, default) for p, param in zip(prompts, params, strict=True))


def _include_usage(fields: Fields, stream: bool) -> bool:
    options: Any = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise fields.wrong("stream_options", "an object")
    if not stream:
        raise bad_request("'stream_options' needs 'stream' to be true.", "stream_options")
    return Fields(options, "stream_options").boolean(table.INCLUDE_USAGE)


def _priority(fields: Fields) -> PriorityClass:
    """OpenAI's service_tier: 'flex' is work that can wait."""
    return "batch" if fields.string(table.SERVICE_TIER) == "flex" else "interactive"


def _timeout(fields: Fields, limits: IntakeLimits) -> float | None:
    if not fields.has("timeout"):
        return None
    return fields.number(table.time_limit(limits.max_timeout_s))
