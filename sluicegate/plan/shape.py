"""The numbers of a model that decide how large its tensors, its KV cache and its reads are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Queries in `num_heads` heads over keys and values in `num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_head_norms: bool = False

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one layer keeps of a token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: one latent of `kv_rank` and a rotary key of `rope_dim` for all heads (DeepSeek-V2, arXiv:2405.04434)."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one layer keeps of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the `top_k` tokens that a latent layer attends to (DeepSeek-V3.2). Layers that own none use the last owner's choice."""

    num_heads: int
    head_dim: int
    top_k: int
    num_owners: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward layers of which each token uses a few. `shared_size` 0: none that all tokens use."""

    num_layers: int
    num_experts: int
    num_chosen: int
    size: int
    shared_size: int
    has_correction_bias: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. Sizes in numbers, not bytes.

    `num_mtp`: layers for multi-token prediction after the last one; `mtp_copies`: such a layer stores embedding and head again.
    `num_window_layers` of the layers read the last `window` tokens only. `as_shipped`: the precision policy of the checkpoint.
    """

    name: str
    family: str
    hidden: int
    vocabulary: int
    num_layers: int
    attention: GroupedAttention | LatentAttention
    dense_size: int
    experts: Experts | None
    indexer: Indexer | None
    context: int
    is_tied: bool
    norms_per_layer: int = 2
    num_mtp: int = 0
    mtp_copies: bool = False
    num_window_layers: int = 0
    window: int = 0
    as_shipped: str = "bf16"

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward part all tokens use whole."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)
