"""The numbers that define a model, whichever file they came from."""

from dataclasses import dataclass
from typing import Literal

from kernels.kv_layout import MAX_LATENT_DIM
from worker.model.errors import ModelError

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 20  # the rotary table has a row for each position
MAX_PREDICTORS = 64


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts.

    `linear` divides all by `factor`. `llama3` divides low ones by it, keeps high ones and blends between (Llama 3.1). `yarn` does so
    between dimensions that turn `beta_fast` and `beta_slow` times in the original context, and multiplies cosines and sines by
    `attention_factor` (Peng et al., 2023).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0  # DeepSeek scales attention's scores by the square of `yarn_mscale` of this
    truncate: bool = True  # whether the ends of the blend are whole dimensions


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A model's mixtures of experts. How rows choose is said in `kernels.moe.Routing`."""

    num_experts: int
    top_k: int
    size: int  # inside an expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0
    shared_size: int = 0  # inside the part that every row goes through; 0: there is none
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary feed-forward

    def check(self, source: str) -> None:
        """Raise ModelError for numbers that no model has."""
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ModelError(f"{source}: number of experts {self.num_experts} is out of range")
        if not (1 <= self.size <= MAX_SIZE and 0 <= self.shared_size <= MAX_SIZE):
            raise ModelError(f"{source}: size of experts {self.size} or {self.shared_size} is out of range")
        if self.num_groups < 1 or self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ModelError(
                f"{source}: {self.num_experts} experts in {self.num_groups} groups, of which {self.top_groups} are chosen, can't be"
            )
        if not 1 <= self.top_k <= self.num_experts // self.num_groups * self.top_groups:
            raise ModelError(f"{source}: number of chosen experts {self.top_k} is out of range")
        if not 0 < self.scale < 1e6:
            raise ModelError(f"{source}: factor of experts {self.scale} is out of range")


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """What chooses the positions that sparse attention looks at."""

    num_heads: int
    head_dim: int
    top_k: int  # positions for each row
    layers: tuple[int, ...]  # that have an indexer; others take the choice of the last one before them

    def check(self, source: str, rope_dim: int) -> None:
        """Raise ModelError for numbers that no model has."""
        if not (1 <= self.num_heads <= MAX_SIZE and 1 <= self.top_k <= MAX_SIZE):
            raise ModelError(f"{source}: index_n_heads {self.num_heads} or index_topk {self.top_k} is out of range")
        if self.head_dim % 8 or not max(8, rope_dim) <= self.head_dim <= 256:
            raise ModelError(f"{source}: index_head_dim {self.head_dim} is not a multiple of 8 from {rope_dim} to 256")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention. `head_dim` of the model is nope_dim + rope_dim."""

    q_rank: int | None  # of the smaller vector that queries are made of; None: they are made straight
    kv_rank: int
    nope_dim: int  # of a head's part without a position
    rope_dim: int  # of its rotated part
    v_dim: int
    is_interleaved: bool  # whether neighbours are rotated together in the checkpoint, or halves
    indexer: IndexerConfig | None = None

    def check(self, source: str) -> None:
        """Raise ModelError for numbers that no model has."""
        sizes = {"kv_lora_rank": self.kv_rank, "qk_nope_head_dim": self.nope_dim, "v_head_dim": self.v_dim}
        sizes |= {} if self.q_rank is None else {"q_lora_rank": self.q_rank}
        for name, value in sizes.items():
            if not 1 <= value <= MAX_SIZE:
                raise ModelError(f"{source}: {name} {value} is out of range")
        if self.rope_dim % 2 or not 2 <= self.rope_dim <= 256:
            raise ModelError(f"{source}: qk_rope_head_dim {self.rope_dim} is not an even number from 2 to 256")
        if (self.kv_rank + self.rope_dim) % 8 or self.kv_rank + self.rope_dim > MAX_LATENT_DIM:
            raise ModelError(
                f"{source}: kv_lora_rank + qk_rope_head_dim is {self.kv_rank + self.rope_dim}, not a multiple of 8 up to {MAX_LATENT_DIM}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyperparameters of a decoder-only transformer. What an architecture doesn't have keeps its default."""

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
    rotary_dim: int | None = None  # the first dimensions of a head are rotated; None: all
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False  # each head of queries and keys is normalized
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim)
    windows: tuple[int | None, ...] = ()  # how far each layer looks back; empty: all of them without end
    local_rope_theta: float | None = None  # the base of layers with a window, if it's another
    embedding_factor: float = 1.0
    norm_offset: float = 0.0  # what a norm's factor is more than the number in the checkpoint
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    num_predictors: int = (
        1  # layers past the last that predict further tokens: a checkpoint may hold so many, which are left out
    )

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
        if not 1 <= self.num_predictors <= MAX_PREDICTORS:
            raise ModelError(f"{source}: num_nextn_predict_layers {self.num_predictors} is out of range")
        if not 1 <= self.context_length <= MAX_CONTEXT:
            raise ModelError(f"{source}: context_length {self.context_length} is out of range")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{source}: {self.num_heads} heads are no multiple of {self.num_kv_heads} kv heads")
        if self.head_dim % 8 or self.head_dim > 256:
            raise ModelError(f"{source}: head_dim {self.head_dim} is not a multiple of 8 up to 256")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ModelError(f"{source}: {self.rotary_dim} rotated dimensions of {self.head_dim} can't be")
        if len(self.windows) not in (0, self.num_layers) or any(w is not None and w < 1 for w in self.windows):
            raise ModelError(f"{source}: windows of attention are out of range")
        if self.experts is not None:
            self.experts.check(source)
        for name, number in (("rope_theta of windows", self.local_rope_theta), ("softmax_scale", self.softmax_scale)):
            if number is not None and not 0 < number < 1e12:
                raise ModelError(f"{source}: {name} {number} is out of range")
        if not (0 < self.rms_eps < 1 and 1 < self.rope_theta < 1e12):
            raise ModelError(f"{source}: rms_eps {self.rms_eps} or rope_theta {self.rope_theta} is out of range")
