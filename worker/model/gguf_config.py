"""The metadata of a GGUF file as a ModelConfig, and the names of its tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from worker.model.config import MAX_LAYERS, ExpertsConfig, ModelConfig, RopeScaling
from worker.model.errors import ModelError
from worker.model.gguf_header import GgufHeader

_NAMES = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight",
    "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight", "post_attn_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "post_ffn_norm": "post_ffw_norm.weight", "router": "ffn_gate_inp.weight",
    # One tensor holds a matrix of all experts.
    "expert_gate": "ffn_gate_exps.weight", "expert_up": "ffn_up_exps.weight", "expert_down": "ffn_down_exps.weight",
}  # fmt: skip
# What changes results in one architecture or another, and in none that is read here.
_FOREIGN = (
    ".attn_logit_softcapping", ".final_logit_softcapping", ".router_logit_softcapping", ".logit_scale", ".embedding_scale", ".residual_scale",
    ".attention.scale", ".attention.clamp_kqv", ".attention.max_alibi_bias", ".attention.temperature_scale", ".expert_shared_count",
    ".expert_group_count", ".expert_weights_scale",
)  # fmt: skip
_SOFTMAX_GATING = 1
_GEMMA3_LOCAL_THETA, _GEMMA3_PATTERN, _GEMMA3_27B_LAYERS = 10000.0, 6, 62


def tensor_name(role: str, layer: int | None, expert: int | None = None) -> str:
    """What a GGUF file calls a tensor."""
    return _NAMES[role] if layer is None else f"blk.{layer}.{_LAYER_NAMES[role]}"


class Metadata:
    """Typed look-ups of metadata; names that begin with a dot are the architecture's own."""

    def __init__(self, header: GgufHeader) -> None:
        self._metadata = header.metadata
        self.label = str(header.path)
        self.architecture = self.get("general.architecture", str)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of this type; raises ModelError if it is of another type, or missing without a default."""
        key = self.architecture + key if key.startswith(".") else key
        value = self._metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.label}: metadata {key!r} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.label}: metadata {key!r} must be {kind.__name__}, got {type(value).__name__}")
        return value

    def refuse(self, *keys: str) -> None:
        """Raise ModelError naming a key that is there and not zero: it would change results."""
        for key in keys:
            if self._metadata.get(self.architecture + key):
                raise ModelError(f"{self.label}: metadata {self.architecture + key!r} is not supported")


def gguf_config(header: GgufHeader) -> ModelConfig:
    """The numbers of the model; raises ModelError."""
    fields = Metadata(header)
    architecture = _ARCHITECTURES.get(fields.architecture)
    if architecture is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        name = fields.architecture[:100]
        raise ModelError(f"{fields.label}: architecture {name!r} is not supported (supported: {known})")
    fields.refuse(*_FOREIGN)
    config = architecture.read(fields, _common(fields, architecture.name, header))
    config.check(fields.label)
    return config


def _common(fields: Metadata, name: str, header: GgufHeader) -> ModelConfig:
    num_heads, hidden_size = fields.get(".attention.head_count", int), fields.get(".embedding_length", int)
    if num_heads < 1:
        raise ModelError(f"{fields.label}: num_heads {num_heads} is out of range")
    head_dim = fields.get(".attention.key_length", int, hidden_size // num_heads)
    for key in (".rope.dimension_count", ".attention.value_length"):
        size = fields.get(key, int, head_dim)
        if size != head_dim:
            raise ModelError(
                f"{fields.label}: metadata {fields.architecture + key!r} {size} of {head_dim} dimensions is not supported"
            )
    return ModelConfig(
        architecture=name,
        num_layers=fields.get(".block_count", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get(".attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        ffn_size=fields.get(".feed_forward_length", int),
        vocab_size=len(fields.get("tokenizer.ggml.tokens", list)),
        context_length=fields.get(".context_length", int),
        rms_eps=fields.get(".attention.layer_norm_rms_epsilon", float),
        rope_theta=fields.get(".rope.freq_base", float, 10000.0),
        rope_scaling=_rope_scaling(fields),
        tie_embeddings=_NAMES["head"] not in header.tensors,
    )  # fmt: skip


def _rope_scaling(fields: Metadata) -> RopeScaling | None:
    """As readers of the format do, a factor without a type is one of linear scaling; older files call it `scale_linear`."""
    if fields.get(".rope.scaling.attn_factor", float, 1.0) != 1.0:
        raise ModelError(
            f"{fields.label}: metadata {fields.architecture + '.rope.scaling.attn_factor'!r} is not supported"
        )
    kind = fields.get(".rope.scaling.type", str, "linear")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"{fields.label}: rope scaling {kind!r} is not supported (none and linear are)")
    factor = fields.get(".rope.scaling.factor", float, fields.get(".rope.scale_linear", float, 1.0))
    if factor == 1.0:
        return None
    if not 1.0 <= factor <= 1e4:
        raise ModelError(f"{fields.label}: rope scaling factor {factor} is out of range")
    return RopeScaling("linear", factor)


def _llama(fields: Metadata, config: ModelConfig) -> ModelConfig:
    fields.refuse(".expert_count")
    return config


def _qwen2(fields: Metadata, config: ModelConfig) -> ModelConfig:
    return replace(config, qkv_bias=True)


def _qwen3(fields: Metadata, config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True)


def _qwen3_moe(fields: Metadata, config: ModelConfig) -> ModelConfig:
    """Files don't say whether the chosen experts' scores are normalized: those of all models of this kind are."""
    if fields.get(".expert_gating_func", int, _SOFTMAX_GATING) != _SOFTMAX_GATING:
        raise ModelError(
            f"{fields.label}: metadata 'qwen3moe.expert_gating_func' is not supported (softmax, {_SOFTMAX_GATING}, is)"
        )
    experts = ExpertsConfig(
        num_experts=fields.get(".expert_count", int),
        top_k=fields.get(".expert_used_count", int),
        size=fields.get(".expert_feed_forward_length", int),
        normalize=True,
    )
    return replace(config, qk_norm=True, experts=experts)


def _gemma3(fields: Metadata, config: ModelConfig) -> ModelConfig:
    """Norms are stored with their 1. Windows' pattern and base are the family's if the file has no others; the largest model scales by its
    hidden size."""
    window = fields.get(".attention.sliding_window", int)
    pattern = fields.get(".attention.sliding_window_pattern", int, _GEMMA3_PATTERN)
    if pattern < 1:
        raise ModelError(
            f"{fields.label}: metadata 'gemma3.attention.sliding_window_pattern' {pattern} is out of range"
        )
    layers = range(1, min(config.num_layers, MAX_LAYERS) + 1)
    scale = config.head_dim
    if config.num_layers == _GEMMA3_27B_LAYERS:
        scale = config.hidden_size // config.num_heads
    return replace(
        config,
        rope_theta=fields.get(".rope.freq_base", float, 1000000.0),
        local_rope_theta=fields.get(".rope.freq_base_swa", float, _GEMMA3_LOCAL_THETA),
        windows=tuple(window if layer % pattern else None for layer in layers),
        softmax_scale=float(scale) ** -0.5 if scale > 0 else 1.0,
        qk_norm=True,
        embedding_factor=float(config.hidden_size) ** 0.5 if config.hidden_size > 0 else 1.0,
    )


@dataclass(frozen=True, slots=True)
class _GgufArchitecture:
    """Our name of an architecture, and what it adds to the common numbers."""

    name: str
    read: Callable[[Metadata, ModelConfig], ModelConfig]


_ARCHITECTURES = {
    "gemma3": _GgufArchitecture("gemma3_text", _gemma3),
    "llama": _GgufArchitecture("llama", _llama),
    "qwen2": _GgufArchitecture("qwen2", _qwen2),
    "qwen3": _GgufArchitecture("qwen3", _qwen3),
    "qwen3moe": _GgufArchitecture("qwen3_moe", _qwen3_moe),
}
