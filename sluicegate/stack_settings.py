"""What `sluicegate up` was asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StackSettings:
    """A local stack. `model` is a path, `model_name` the name that clients use."""

    data: Path
    host: str
    port: int
    model_name: str
    model: Path
    workers: int
    kv_dtype: str
    integrity: str
    kv_tokens: int
    page_size: int
    max_sequences: int
    drain_grace_s: float

    def worker_flags(self) -> list[str]:
        """The flags of its workers."""
        return [
            "--model", str(self.model), "--name", self.model_name, "--kv-dtype", self.kv_dtype,
            "--integrity", self.integrity, "--kv-tokens", str(self.kv_tokens), "--page-size", str(self.page_size),
            "--max-sequences", str(self.max_sequences), "--drain-grace", str(self.drain_grace_s),
        ]  # fmt: skip

    def gateway_flags(self, port: int) -> list[str]:
        """The flags of its gateway."""
        return ["--host", self.host, "--port", str(port), "--drain-grace", str(self.drain_grace_s)]
