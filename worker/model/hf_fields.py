"""Fields of a config.json in Hugging Face's layout, and what all architectures read of them."""

from collections.abc import Callable, Sequence
from typing import Any

from worker.model.config import MAX_CONTEXT, MAX_LAYERS, ModelConfig, RopeScaling
from worker.model.errors import ModelError
from worker.model.rope import yarn_mscale

_LARGE = 10**300
_LARGE_INT = 1 << 53  # what a float still holds
_KINDS = ("full_attention", "sliding_attention")
# Fields that change results in one architecture or another, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "layer_types": (),  # any list of full attention
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": ([],),
    "num_kv_shared_layers": (0,),
    "partial_rotary_factor": (1.0,),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleave": (False,),
    "rope_local_base_freq": (),
    "scale_depth": (),
    "scale_emb": (1.0,),
    "sliding_window_pattern": (),
    "use_bidirectional_attention": (False,),
    "use_sliding_window": (False,),
}


class Fields:
    """Typed look-ups in config.json."""

    def __init__(self, raw: dict[str, Any], label: str) -> None:
        self._raw = raw
        self.label = label

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._raw.get(name) is not None

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of this type; null is as good as absent. Raises ModelError if it is of another type, or missing without a default."""
        value = self._raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.label}: {name} is missing")
        if kind is float and type(value) is int:
            value = float(max(-_LARGE, min(value, _LARGE)))  # an int of 400 digits has no float
        if type(value) is not kind:
            raise ModelError(f"{self.label}: {name} must be {kind.__name__}, got {type(value).__name__}")
        if isinstance(value, int) and abs(value) > _LARGE_INT:
            raise ModelError(f"{self.label}: {name} is out of range")
        return value

    def with_defaults(self, defaults: dict[str, Any]) -> "Fields":
        """The same fields, and these where they are absent or null."""
        present = {name: value for name, value in self._raw.items() if value is not None}
        return Fields(defaults | present, self.label)

    def positive(self, name: str, default: int) -> float:
        """A number above zero."""
        value = float(self.get(name, float, float(default)))
        if not 0 < value < _LARGE:
            raise ModelError(f"{self.label}: {name} {value} is out of range")
        return value

    def first_of(self, names: Sequence[str], kind: type) -> Any:
        """A field that has several names."""
        return self.get(next((name for name in names if self.has(name)), names[0]), kind)

    def inside(self, name: str) -> "Fields":
        """The fields of an object in here; none if it is absent or null."""
        return Fields(self.get(name, dict, {}), self.label)

    def require(self, **values: Any) -> None:
        """Raise ModelError naming a field that is there with another value than this: it would change results."""
        for name, wanted in values.items():
            found = self.get(name, type(wanted), wanted)
            if found != wanted:
                raise ModelError(f"{self.label}: {name} {str(found)[:100]!r} is not supported ({wanted!r} is)")

    def refuse_others(self, *handled: str) -> None:
        """Raise ModelError naming a field that changes results in some architecture, unless it's one that the caller handles."""
        for name, neutral in _NEUTRAL.items():
            value = self._raw.get(name)
            is_full = name == "layer_types" and isinstance(value, list) and set(map(str, value)) <= {"full_attention"}
            if name not in handled and value is not None and value not in neutral and not is_full:
                raise ModelError(f"{self.label}: {name} {str(value)[:100]!r} is not supported for this architecture")
        if "partial_rotary_factor" not in handled:
            self.rope.require(partial_rotary_factor=1.0)

    @property
    def rope(self) -> "Fields":
        """What is said of rotary embedding, under its newer or its older name."""
        return self.inside("rope_parameters" if self.has("rope_parameters") else "rope_scaling")


def decoder_config(
    fields: Fields, *, head_dim: int | None = None, rope_theta: float = 10000.0, tie_embeddings: bool = False
) -> ModelConfig:
    """The numbers that most architectures call alike; an architecture may have defaults of its own."""
    num_heads, hidden_size = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
    if num_heads < 1:
        raise ModelError(f"{fields.label}: num_heads {num_heads} is out of range")
    rope, context_length = fields.rope, fields.get("max_position_embeddings", int)
    return ModelConfig(
        architecture=fields.get("model_type", str),
        num_layers=fields.get("num_hidden_layers", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
        head_dim=fields.get("head_dim", int, head_dim or hidden_size // num_heads),
        ffn_size=fields.get("intermediate_size", int),
        vocab_size=fields.get("vocab_size", int),
        context_length=context_length,
        rms_eps=fields.get("rms_norm_eps", float, 1e-6),
        rope_theta=fields.get("rope_theta", float, rope.get("rope_theta", float, rope_theta)),
        rope_scaling=rope_scaling(rope, context_length),
        tie_embeddings=fields.get("tie_word_embeddings", bool, tie_embeddings),
    )


def late_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen's layers: those from `max_window_layers` on have one if `use_sliding_window` says so."""
    if not fields.get("use_sliding_window", bool, False):
        fields.refuse_others("use_sliding_window")
        return ()
    first = fields.get("max_window_layers", int, 28)
    return layer_windows(fields, num_layers, lambda layer: layer >= first)


def layer_windows(fields: Fields, num_layers: int, is_near: Callable[[int], bool]) -> tuple[int | None, ...]:
    """How far each layer looks back: as `layer_types` says, or else `is_near` of the layer's number."""
    window = fields.get("sliding_window", int, 4096)
    usual = [_KINDS[is_near(layer)] for layer in range(min(num_layers, MAX_LAYERS))]
    kinds = fields.get("layer_types", list, usual)
    if len(kinds) != num_layers or not all(kind in _KINDS for kind in kinds):
        raise ModelError(f"{fields.label}: layer_types must name {' or '.join(_KINDS)} for each of {num_layers} layers")
    return tuple(window if kind == _KINDS[1] else None for kind in kinds)


def rope_scaling(rope: Fields, context_length: int) -> RopeScaling | None:
    """How frequencies are scaled, None for not at all. Raises ModelError for a way that isn't supported."""
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"{rope.label}: rope scaling {kind!r} is not supported (default, linear, llama3 and yarn are)")
    factor = rope.get("factor", float)
    if not 1.0 <= factor <= 1e4:
        raise ModelError(f"{rope.label}: rope scaling factor {factor} is out of range")
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = rope.get("original_max_position_embeddings", int, context_length if kind == "yarn" else None)
    if not 1 <= original <= MAX_CONTEXT:
        raise ModelError(f"{rope.label}: original_max_position_embeddings is out of range")
    if kind == "yarn":
        return _yarn(rope, factor, original)
    low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
    if not 0 < low < high:
        raise ModelError(f"{rope.label}: low_freq_factor must lie between 0 and high_freq_factor")
    return RopeScaling("llama3", factor, low, high, original)


def _yarn(rope: Fields, factor: float, original: int) -> RopeScaling:
    mscale, mscale_all_dim = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    sharpened = yarn_mscale(factor)
    if mscale and mscale_all_dim:
        sharpened = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    attention_factor = rope.get("attention_factor", float, sharpened)
    fast, slow = rope.get("beta_fast", float, 32.0), rope.get("beta_slow", float, 1.0)
    if not (0 < slow <= fast < 1e6 and 0 < attention_factor < 1e3 and 0 <= mscale_all_dim < 1e3):
        raise ModelError(f"{rope.label}: beta_fast, beta_slow, mscale or attention_factor of yarn is out of range")
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention_factor,
        mscale_all_dim=mscale_all_dim,
        truncate=rope.get("truncate", bool, True),
    )
