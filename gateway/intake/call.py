"""What a client asked for, checked and in tokens."""

from dataclasses import dataclass, field
from typing import Literal

from protocol.job import SamplingParams
from protocol.key_space import PriorityClass


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """One HTTP request for text. `samplings[i]` belongs to `prompts[i]`: their max_tokens may differ where the context is the limit."""

    kind: Literal["chat", "completion"]
    model: str
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    samplings: tuple[SamplingParams, ...] = field(repr=False)
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    cache_salt: str | None = field(repr=False)
    timeout_s: float | None
    priority: PriorityClass = "interactive"
    share_group: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the intake must know of a model, as one caller may use it. Without `max_output_tokens` an answer may fill the context."""

    name: str
    card_digest: str
    max_request_tokens: int
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Bounds from the gateway's settings."""

    max_choices: int
    max_prompts: int
    max_timeout_s: float
