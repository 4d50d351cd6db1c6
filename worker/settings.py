"""A worker's configuration, complete before anything starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from protocol.ids import ModelName, WorkerId, new_process_id
from worker.errors import SettingsError

KvDtype = Literal["bf16", "fp16", "fp8"]
IntegrityMode = Literal["off", "lease", "seal", "full"]
# A step must not take so long that it looks like a stalled engine.
MIN_RATE, MAX_RATE = 0.1, 1e9
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """A model that is only played. Rates are tokens a second, 0 for as fast as it goes: prompts share `prefill_rate`, each stream has
    `decode_rate`. `context_length` is the longest prompt with its answer.
    """

    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    context_length: int = 8192

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate"):
            rate = getattr(self, name)
            if not (rate == 0 or MIN_RATE <= rate <= MAX_RATE):
                raise SettingsError(f"{name} must be 0 or {MIN_RATE:g} to {MAX_RATE:g} tokens a second, got {rate:g}")
        if not 2 <= self.context_length <= MAX_CONTEXT:
            raise SettingsError(f"context_length must be 2 to {MAX_CONTEXT} tokens, got {self.context_length}")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Sizes are in tokens unless the name says otherwise. Either a model or `synthetic` is given.

    `activations_bits` is what the products with quantized weights round activations to: 8 makes prompts cheaper and answers less exact.
    `step_tokens` bounds the tokens of one engine step, and with it how long a running stream waits for somebody's prompt.
    `kv_scales` is 1, checkpoint, auto or a file (`worker/kv_scales.py`).
    `stall_s` is how long a step may take before the worker stops calling itself alive and renewing its leases; `lease_s` how long after the
    last renewal its jobs are somebody else's. Without a `routing_key` nobody is told what's in the cache.
    """

    redis_url: str = field(repr=False)
    model_path: Path | None
    model_name: ModelName
    job_signing_key: bytes = field(repr=False)
    namespace_secret: bytes = field(repr=False)
    key_prefix: str = "sg"
    kernels: str = "auto"
    kv_dtype: KvDtype = "fp16"
    kv_scales: str = "auto"
    activations_bits: int = 16
    integrity: IntegrityMode = "seal"
    allow_fault_injection: bool = False
    kv_tokens: int = 16384
    page_size: int = 16
    max_sequences: int = 32
    step_tokens: int = 256
    worker_id: WorkerId = field(default_factory=lambda: WorkerId(new_process_id("worker")))
    drain_grace_s: float = 30.0
    heartbeat_s: float = 0.25
    liveness_ttl_s: float = 3.0
    stall_s: float = 30.0
    synthetic: SyntheticSettings | None = None
    lease_s: float = 2.0
    max_deliveries: int = 3
    routing_key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.activations_bits not in {8, 16}:
            raise SettingsError(f"activations_bits must be 16 or 8, got {self.activations_bits}")
        if self.page_size not in {1, 2, 4, 8, 16, 32, 64, 128, 256}:
            raise SettingsError(f"page_size must be a power of two from 1 to 256, got {self.page_size}")
        if self.kv_tokens < 2 * self.page_size:
            raise SettingsError(f"kv_tokens must hold two pages of {self.page_size} at least, got {self.kv_tokens}")
        if not 1 <= self.max_sequences <= 1024:
            raise SettingsError(f"max_sequences must be 1 to 1024, got {self.max_sequences}")
        if self.step_tokens < self.max_sequences:
            raise SettingsError(
                f"step_tokens ({self.step_tokens}) must be at least max_sequences ({self.max_sequences}), "
                "or running streams could not all advance in a step"
            )
        if (self.model_path is None) == (self.synthetic is None):
            raise SettingsError("either model_path or synthetic must be given")
        if self.synthetic and self.step_tokens > self.synthetic.prefill_rate * self.stall_s / 2 > 0:
            raise SettingsError(
                f"prefill_rate {self.synthetic.prefill_rate:g} is too low for steps of {self.step_tokens} tokens: "
                f"a step may take {self.stall_s / 2:g} s"
            )

        if not 0.5 <= self.lease_s <= 600:
            raise SettingsError(f"lease_s must be 0.5 to 600, got {self.lease_s}")
        if self.stall_s <= 0 or self.max_deliveries < 1:
            raise SettingsError("stall_s must be above 0 and max_deliveries at least 1")

    @property
    def num_pages(self) -> int:
        """Whole pages that fit kv_tokens."""
        return self.kv_tokens // self.page_size
