"""The numbers that define a model, whichever file they came from."""

from dataclasses import dataclass
from typing import Literal

from worker.model.errors import ModelError

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20
MAX_CONTEXT = 1 << 20  # the rotary table has a row for each position


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts.

    `linear` divides all by `factor`. `llama3` divides low ones by it, keeps high ones and blends between (Llama 3.1).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyperparameters of a decoder-only transformer of the llama family."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool

    def check(self, source: str) -> None:
        """Raise ModelError for numbers that no model has: they'd become huge allocations or wrong shapes."""
        sizes = {
            "hidden_size": self.hidden_size, "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "ffn_size": self.ffn_size, "vocab_size": self.vocab_size,
        }  # fmt: skip
        for name, value in sizes.items():
            if not 1 <= value <= MAX_SIZE:
                raise ModelError(f"{source}: {name} {value} is out of range")
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise ModelError(f"{source}: num_layers {self.num_layers} is out of range")
        if not 1 <= self.context_length <= MAX_CONTEXT:
            raise ModelError(f"{source}: context_length {self.context_length} is out of range")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{source}: {self.num_heads} heads are no multiple of {self.num_kv_heads} kv heads")
        if self.head_dim % 8 or self.head_dim > 256:
            raise ModelError(f"{source}: head_dim {self.head_dim} is not a multiple of 8 up to 256")
        if not (0 < self.rms_eps < 1 and 1 < self.rope_theta < 1e12):
            raise ModelError(f"{source}: rms_eps {self.rms_eps} or rope_theta {self.rope_theta} is out of range")
