"""A worker's configuration, complete before anything starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from protocol.ids import ModelName, WorkerId, new_process_id
from worker.errors import SettingsError

KvDtype = Literal["bf16", "fp16", "fp8"]
IntegrityMode = Literal["off", "lease"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Sizes are in tokens unless the name says otherwise.

    `step_tokens` bounds the tokens of one engine step, and with it how long a running stream waits for somebody's prompt.
    `stall_s` is how long a step may take before the worker stops calling itself alive.
    """

    redis_url: str = field(repr=False)
    model_path: Path
    model_name: ModelName
    job_signing_key: bytes = field(repr=False)
    namespace_secret: bytes = field(repr=False)
    key_prefix: str = "sg"
    kernels: str = "auto"
    kv_dtype: KvDtype = "fp16"
    integrity: IntegrityMode = "lease"
    kv_tokens: int = 16384
    page_size: int = 16
    max_sequences: int = 32
    step_tokens: int = 256
    worker_id: WorkerId = field(default_factory=lambda: WorkerId(new_process_id("worker")))
    drain_grace_s: float = 30.0
    heartbeat_s: float = 0.25
    liveness_ttl_s: float = 3.0
    stall_s: float = 30.0

    def __post_init__(self) -> None:
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

    @property
    def num_pages(self) -> int:
        """Whole pages that fit kv_tokens."""
        return self.kv_tokens // self.page_size
