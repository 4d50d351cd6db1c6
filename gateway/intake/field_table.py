"""The fields of a request as data: what validation checks and what /openapi.json tells, from one source.

A row is a field with one type and a range. Fields whose check doesn't fit a row (`messages`, `prompt`, `stop` ...) are `Special`: code checks them,
and their JSON schema stands here beside the limits that the code uses.
"""

from dataclasses import dataclass, field
from typing import Any

MAX_TOKENS = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_MODEL_CHARACTERS = 256
MAX_SALT_CHARACTERS = 128
MAX_NAME_CHARACTERS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in [low, high], or (low, high] if `open_low`."""

    name: str
    low: float
    high: float
    default: float
    text: str
    open_low: bool = False


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer in [low, high]; None where it's absent."""

    name: str
    low: int
    high: int
    text: str


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false; false where it's absent."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A string of valid Unicode."""

    name: str
    max_length: int
    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """A field with a check of its own; `schema` describes what it accepts beside null."""

    name: str
    schema: dict[str, Any] = field(hash=False)
    text: str = ""
    is_required: bool = False


Row = Number | Integer | Boolean | Text | Special

MODEL = Text("model", MAX_MODEL_CHARACTERS, "The model's name, from /v1/models.")
STREAM = Boolean("stream", "Send the answer as server-sent events.")
CACHE_SALT = Text("cache_salt", MAX_SALT_CHARACTERS, "Prefixes are shared only among requests with the same salt.")
SHARE_GROUP = Text(
    "share_group", 64, "Share prefixes with the tenants of this group, instead of keeping them to yourself."
)
SERVICE_TIER = Text("service_tier", 32, "'flex' is work that can wait.")
INCLUDE_USAGE = Boolean("include_usage", "Send a last event with the usage.")
TEMPERATURE = Number("temperature", 0, 2, 1.0, "0 always takes the likeliest token.")
TOP_P = Number("top_p", 0, 1, 1.0, "Keep the likeliest tokens up to this probability.", open_low=True)
MIN_P = Number("min_p", 0, 1, 0.0, "Drop tokens less likely than this share of the likeliest.")
TOP_K = Integer("top_k", -1, MAX_TOKENS, "Keep so many of the likeliest tokens; 0 or -1 keeps all.")
PRESENCE_PENALTY = Number("presence_penalty", -2, 2, 0.0, "Against tokens that the output has.")
FREQUENCY_PENALTY = Number("frequency_penalty", -2, 2, 0.0, "Against tokens that the output has often.")
REPETITION_PENALTY = Number(
    "repetition_penalty", 0, 10, 1.0, "Against tokens of prompt and output; 1 is none.", open_low=True
)
SEED = Integer("seed", -(2**63), 2**63 - 1, "The same seed gives the same answer.")
MIN_TOKENS = Integer("min_tokens", 0, MAX_TOKENS, "No end before so many tokens.")
IGNORE_EOS = Boolean("ignore_eos", "Go on after the token that ends an answer.")
MAX_COMPLETION_TOKENS = Integer("max_completion_tokens", 1, MAX_TOKENS, "Longest answer.")
CHAT_MAX_TOKENS = Integer("max_tokens", 1, MAX_TOKENS, "The older name of max_completion_tokens.")
CHAT_LOGPROBS = Boolean("logprobs", "Report logprobs of the answer's tokens.")
TOP_LOGPROBS = Integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "Alternatives beside each token; needs logprobs.")
LOGPROBS = Integer("logprobs", 0, MAX_TOP_LOGPROBS, "Report logprobs with so many alternatives.")
ECHO = Boolean("echo", "Begin the answer with the prompt.")
BEST_OF = Integer("best_of", 1, MAX_TOKENS, "Only the value of n is supported.")
NAME = Text("name", MAX_NAME_CHARACTERS, "A name that the template may show.")


def completion_max_tokens(*, echo: bool) -> Integer:
    """`max_tokens` of a text completion: an echo alone needs none."""
    return Integer("max_tokens", 0 if echo else 1, MAX_TOKENS, "Longest continuation (16 if absent); 0 with echo only.")


def samples(max_choices: int) -> Integer:
    """`n`."""
    return Integer("n", 1, max_choices, "Answers to each prompt.")


def time_limit(max_timeout_s: float) -> Number:
    """`timeout`."""
    return Number("timeout", 0, max_timeout_s, max_timeout_s, "Seconds after which the request ends.", open_low=True)


_TOKEN_ID = {"type": "integer", "minimum": 0}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
STOP = Special(
    "stop",
    {"anyOf": [_STOP_TEXT, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP_TEXT}]},
    "Texts before which the answer ends.",
)
STOP_TOKEN_IDS = Special(
    "stop_token_ids",
    {"type": "array", "maxItems": MAX_STOP_TOKEN_IDS, "items": _TOKEN_ID},
    "Tokens that end the answer.",
)
LOGIT_BIAS = Special(
    "logit_bias",
    {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": ["number", "null"], "minimum": -100, "maximum": 100},
    },
    "Token id to what is added to its logit.",
)
STREAM_OPTIONS = Special(
    "stream_options",
    {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "Only with stream.",
)
MESSAGES = Special(
    "messages",
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
                "name": {"type": ["string", "null"], "maxLength": MAX_NAME_CHARACTERS},
            },
        },
    },
    "The conversation so far.",
    is_required=True,
)
RESPONSE_FORMAT = Special(
    "response_format", {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}
)
TOOL_CHOICE = Special("tool_choice", {"enum": ["none", "auto"]})
MODALITIES = Special("modalities", {"const": ["text"]})


def prompt(max_prompts: int) -> Special:
    """`prompt` of a text completion."""
    several = {"type": "array", "minItems": 1, "maxItems": max_prompts}
    schema = {
        "anyOf": [
            {"type": "string", "minLength": 1},
            _TOKEN_IDS,
            {**several, "items": {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}},
        ]
    }
    return Special("prompt", schema, "Text or token ids, one prompt or several.", is_required=True)


SAMPLING: tuple[Row, ...] = (
    TEMPERATURE, TOP_P, MIN_P, TOP_K, PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY, SEED, MIN_TOKENS, IGNORE_EOS,
    STOP, STOP_TOKEN_IDS, LOGIT_BIAS, STREAM, STREAM_OPTIONS, CACHE_SALT, SHARE_GROUP, SERVICE_TIER,
)  # fmt: skip
CHAT: tuple[Row, ...] = (
    MESSAGES, MAX_COMPLETION_TOKENS, CHAT_MAX_TOKENS, CHAT_LOGPROBS, TOP_LOGPROBS, RESPONSE_FORMAT, TOOL_CHOICE, MODALITIES,
)  # fmt: skip
COMPLETION: tuple[Row, ...] = (completion_max_tokens(echo=True), LOGPROBS, ECHO, BEST_OF)

# Known to OpenAI's clients or to other servers, and refused: what isn't supported must not be ignored.
CHAT_UNSUPPORTED = (
    "tools", "functions", "function_call", "audio", "prediction", "web_search_options", "chat_template",
    "chat_template_kwargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "use_beam_search", "prompt_logprobs", "documents",
)  # fmt: skip
COMPLETION_UNSUPPORTED = (
    "suffix", "prompt_embeds", "guided_json", "guided_regex", "guided_choice", "response_format", "use_beam_search",
)  # fmt: skip
