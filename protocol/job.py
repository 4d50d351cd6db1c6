"""What a gateway asks of a worker: one prompt, `n` samples of its continuation."""

from dataclasses import dataclass, field

from protocol.ids import GatewayId, ModelName, RequestId, TenantId
from protocol.key_space import PriorityClass, line_name
from protocol.replies import FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Neutral values switch a rule off; the gateway has checked all ranges.

    temperature 0 is greedy. top_k 0 and top_p 1 keep every token. `seed` is always set: a client that gives none gets
    one drawn by the gateway, so that a preempted or resumed request goes on with the same randomness. presence and
    frequency penalties count output tokens, the repetition penalty counts prompt and output. `logprobs` is the number
    of alternatives reported beside each sampled token, None for no logprobs at all.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """What a client already has of one sample: its tokens so far, and why it ended if it has."""

    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where another attempt goes on: the samples as far as they were delivered, and what the first attempt found in the cache."""

    samples: tuple[SampleProgress, ...] = field(repr=False)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt on its way to a worker.

    `attempt` counts from 1; a message of an older attempt is stale. Times are Unix milliseconds. `prompt_logprobs` asks for
    the logprob of each prompt token with that many alternatives (`echo` of /v1/completions). `cache_salt` narrows the
    namespace in which prefixes are shared; it can never widen it, since the tenant is always part of it. `progress` is set if an earlier
    attempt was lost after its gateway had something of it: then the answer goes on from there.
    """

    request_id: RequestId
    gateway_id: GatewayId
    tenant: TenantId
    model: ModelName
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams = field(repr=False)
    created_ms: int
    deadline_ms: int
    n: int = 1
    attempt: int = 1
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: PriorityClass = "interactive"
    progress: Progress | None = None
    trace_context: str | None = None  # a W3C traceparent
    share_group: str | None = None  # the identity of a group that the tenant was found to be in
    tenant_since_ms: int = 0  # when the tenant was made: a later one of the same name is another
    session: bytes | None = field(default=None, repr=False)  # the digest of the client's session (protocol.routing)

    @property
    def line(self) -> str:
        """The line in which it waits."""
        return line_name(self.priority, self.tenant)

    @property
    def max_output_tokens(self) -> int:
        """The most tokens that may be generated, over all samples."""
        return self.sampling.max_tokens * self.n
