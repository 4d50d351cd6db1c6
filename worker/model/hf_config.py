"""config.json of a folder in Hugging Face's layout, read as a ModelConfig."""

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
        value = self._raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.label}: {name} is missing")
        if kind is float and type(value) is int:
            value = float(max(-_LARGE, min(value, _LARGE)))  # an int of 400 digits has no float
        if type(value) is not kind:
            raise ModelError(f"{self.label}: {name} must be {kind.__name__}, got {type(value).__name__}")
        return value


def model_config(raw: dict[str, Any], label: str) -> ModelConfig:
    """The numbers of a config.json; `label` names the file. Raises ModelError."""
    fields = Fields(raw, label)
    architecture = fields.get("model_type", str)
    if architecture != "llama":
        raise ModelError(f"{fields.label}: model_type {architecture!r} is not supported (llama is)")
    for name in ("attention_bias", "mlp_bias"):
        if fields.get(name, bool, False):
            raise ModelError(f"{fields.label}: {name} is not supported")
    if fields.get("hidden_act", str, "silu") != "silu":
        raise ModelError(f"{fields.label}: hidden_act {raw['hidden_act']!r} is not supported (silu is)")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{fields.label}: quantization_config is not supported for safetensors")
    num_heads, hidden_size = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
    if num_heads < 1:
        raise ModelError(f"{fields.label}: num_heads {num_heads} is out of range")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{fields.label}: rope_scaling must be an object")
    for source in (fields, Fields(rope, fields.label)):
        if source.get("partial_rotary_factor", float, 1.0) != 1.0:
            raise ModelError(f"{fields.label}: partial_rotary_factor is not supported")
    config = ModelConfig(
        architecture=architecture,
        num_layers=fields.get("num_hidden_layers", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
        head_dim=fields.get("head_dim", int, hidden_size // num_heads),
        ffn_size=fields.get("intermediate_size", int),
        vocab_size=fields.get("vocab_size", int),
        context_length=fields.get("max_position_embeddings", int),
        rms_eps=fields.get("rms_norm_eps", float, 1e-6),
        rope_theta=fields.get("rope_theta", float, Fields(rope, fields.label).get("rope_theta", float, 10000.0)),
        rope_scaling=_rope_scaling(Fields(rope, fields.label)),
        tie_embeddings=fields.get("tie_word_embeddings", bool, False),
    )
    config.check(fields.label)
    return config


def _rope_scaling(rope: Fields) -> RopeScaling | None:
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
