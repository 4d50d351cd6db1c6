"""What a worker publishes about itself: the model (enough for a gateway without model files) and its live status."""

from dataclasses import dataclass, field

from protocol.ids import ModelName, WorkerId

BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # upper bounds, inclusive


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer as data.

    `tokenizer_json` is in the format of Hugging Face's `tokenizers`, WITHOUT added tokens and post-processor: it maps any text to
    ordinary tokens only. `control_tokens` are the (text, id) pairs that a chat template may write and a user never can; `text_tokens`
    (`<think>`) are added tokens that anybody may write.
    """

    tokenizer_json: str = field(repr=False)
    control_tokens: tuple[tuple[str, int], ...] = field(repr=False)
    chat_template: str | None = field(repr=False)
    bos_token_id: int | None
    add_bos: bool
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    text_tokens: tuple[tuple[str, int], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as its workers serve it.

    `digest` names weights and quantization (hex sha256). `max_request_tokens` is the most prompt + output tokens that one request can
    ever hold: the context length, or the KV pool's capacity if that is smaller. A synthetic model is only played: its text means nothing.
    """

    name: ModelName
    digest: str
    architecture: str
    context_length: int
    max_request_tokens: int
    tokenizer: TokenizerSpec
    created_s: int
    owned_by: str = "sluicegate"
    kv_dtype: str = "bf16"
    is_synthetic: bool = False
    activations_bits: int = 16


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's gauges, renewed while its engine makes progress. Token and event fields are totals since its start."""

    worker_id: WorkerId
    model: ModelName
    card_digest: str
    pages_total: int
    pages_free: int
    pages_cached: int
    running_sequences: int
    waiting_sequences: int
    max_sequences: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    engine_steps: int = 0
    preemptions: int = 0
    failed_requests: int = 0
    integrity_violations: int = 0
    integrity: tuple[tuple[str, int], ...] = ()
    integrity_mode: str = ""
    is_draining: bool = False
    pid: int = 0
    batch_sizes: tuple[int, ...] = ()  # steps by BATCH_SIZE_BOUNDS, and one count for what is over the last
    batched_sequences: int = 0
