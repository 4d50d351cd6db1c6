"""Fields of a config.json in Hugging Face's layout, and what all architectures read of them."""

from typing import Any

from worker.model.config import MAX_CONTEXT, ModelConfig, RopeScaling
from worker.model.errors import ModelError

_LARGE = 10**300


class Fields:
    """Typed look-ups in config.json."""

    def __init__(self, raw: dict[str, Any], label: str) -> None:
        self._raw = raw
        self.label = label

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
        return value

    def optional(self, name: str, kind: type) -> Any:
        """The same, or None."""
        return None if self._raw.get(name) is None else self.get(name, kind)

    def inside(self, name: str) -> "Fields":
        """The fields of an object in here; none if it is absent or null."""
        return Fields(self.get(name, dict, {}), self.label)

    def require(self, **values: Any) -> None:
        """Raise ModelError naming a field that is there with another value than this: it would change results."""
        for name, wanted in values.items():
            found = self.get(name, type(wanted), wanted)
            if found != wanted:
                raise ModelError(f"{self.label}: {name} {str(found)[:100]!r} is not supported ({wanted!r} is)")

    @property
    def rope(self) -> "Fields":
        """What is said of rotary embedding, under its newer or its older name."""
        return self.inside("rope_scaling" if self._raw.get("rope_parameters") is None else "rope_parameters")


def decoder_config(fields: Fields) -> ModelConfig:
    """The numbers that most architectures call alike."""
    num_heads, hidden_size = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
    if num_heads < 1:
        raise ModelError(f"{fields.label}: num_heads {num_heads} is out of range")
    rope = fields.rope
    return ModelConfig(
        architecture=fields.get("model_type", str),
        num_layers=fields.get("num_hidden_layers", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
        head_dim=fields.get("head_dim", int, hidden_size // num_heads),
        ffn_size=fields.get("intermediate_size", int),
        vocab_size=fields.get("vocab_size", int),
        context_length=fields.get("max_position_embeddings", int),
        rms_eps=fields.get("rms_norm_eps", float, 1e-6),
        rope_theta=fields.get("rope_theta", float, rope.get("rope_theta", float, 10000.0)),
        rope_scaling=rope_scaling(rope),
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
    )


def rope_scaling(rope: Fields) -> RopeScaling | None:
    """How frequencies are scaled, None for not at all. Raises ModelError for a way that isn't supported."""
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"{rope.label}: rope scaling {kind!r} is not supported (default, linear and llama3 are)")
    factor = rope.get("factor", float)
    if not 1.0 <= factor <= 1e4:
        raise ModelError(f"{rope.label}: rope scaling factor {factor} is out of range")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
    if not 0 < low < high:
        raise ModelError(f"{rope.label}: low_freq_factor must lie between 0 and high_freq_factor")
    original = rope.get("original_max_position_embeddings", int)
    if not 1 <= original <= MAX_CONTEXT:
        raise ModelError(f"{rope.label}: original_max_position_embeddings is out of range")
    return RopeScaling("llama3", factor, low, high, original)
