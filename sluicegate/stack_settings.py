"""What `sluicegate up` was asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StackSettings:
    """A local stack. `model` is a path, or None for the synthetic engine; `model_name` is the name that clients use."""

    data: Path
    host: str
    port: int
    model_name: str
    model: Path | None
    workers: int
    kv_dtype: str
    integrity: str
    allow_fault_injection: bool
    kv_tokens: int
    page_size: int
    max_sequences: int
    drain_grace_s: float
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    context: int = 8192
    activations_bits: int = 16
    tenants: Path | None = None
    kv_scales: str = "auto"

    def worker_flags(self) -> list[str]:
        """The flags of its workers."""
        return [
            *self._engine_flags(), *(["--allow-fault-injection"] if self.allow_fault_injection else []), "--name", self.model_name, "--kv-dtype", self.kv_dtype,
            "--kv-scales", self.kv_scales,
            "--integrity", self.integrity, "--kv-tokens", str(self.kv_tokens), "--page-size", str(self.page_size),
            "--max-sequences", str(self.max_sequences), "--drain-grace", str(self.drain_grace_s),
            "--activations-bits", str(self.activations_bits),
        ]  # fmt: skip

    def _engine_flags(self) -> list[str]:
        if self.model is not None:
            return ["--model", str(self.model)]
        return [
            "--engine", "synthetic", "--prefill-rate", str(self.prefill_rate), "--decode-rate", str(self.decode_rate),
            "--context", str(self.context),
        ]  # fmt: skip

    def gateway_flags(self, port: int) -> list[str]:
        """The flags of its gateway."""
        return ["--host", self.host, "--port", str(port), "--drain-grace", str(self.drain_grace_s)]
