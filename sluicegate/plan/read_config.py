"""config.json, as Hugging Face folders have it, read as a ModelShape. Unknown families and numbers that no model has are told in one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluicegate.errors import CommandError
from sluicegate.plan.known_models import KNOWN
from sluicegate.plan.shape import Experts, GroupedAttention, Indexer, LatentAttention, ModelShape

MAX_BYTES = 4 << 20
MAX_SIZE = 1 << 24
LATENT = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
GROUPED = ("gemma3_text", "glm4_moe", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# What the classes of these families assume where a config says nothing: Gemma's multimodal configs leave it out.
GEMMA_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
# Families whose extra prediction layer stores embedding and head once more.
MTP_COPIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite")


def find_shape(model: str) -> ModelShape:
    """Of a built-in name, or of a folder (or its config.json). Raises CommandError."""
    if model in KNOWN:
        return read_shape(KNOWN[model], model, f"built-in {model}")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise CommandError(
            f"no model {model!r}: neither a folder with a config.json nor a built-in name ({', '.join(KNOWN)})"
        )
    if path.stat().st_size > MAX_BYTES:
        raise CommandError(f"{path}: larger than {MAX_BYTES >> 20} MiB, so not a config.json")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: not JSON: {error}") from None
    return read_shape(raw, path.resolve().parent.name, str(path))


def read_shape(raw: Any, name: str, label: str) -> ModelShape:
    """The shape of a parsed config.json; `label` names the file in errors. Of multimodal models the text part."""
    fields = _Fields(raw, label).inner()
    family = fields.text("model_type")
    if family not in LATENT + GROUPED:
        raise CommandError(
            f"{label}: model_type {family!r} is not supported ({', '.join(sorted(LATENT + GROUPED))} are)"
        )
    for flag in ("mlp_bias", *(("attention_bias",) if family in LATENT else ())):
        if fields.flag(flag):
            raise CommandError(f"{label}: {flag} is not supported for {family}")
    experts = _experts(fields, family)
    num_layers = fields.number("num_hidden_layers", high=1024)
    return ModelShape(
        name=name,
        family=family,
        hidden=fields.number("hidden_size"),
        vocabulary=fields.number("vocab_size"),
        num_layers=num_layers,
        attention=_latent(fields) if family in LATENT else _grouped(fields, family),
        dense_size=fields.number("intermediate_size") if experts is None or experts.num_layers < num_layers else 1,
        experts=experts,
        indexer=_indexer(fields, num_layers) if family in ("glm_moe_dsa", "deepseek_v32") else None,
        context=fields.number("max_position_embeddings", high=1 << 30),
        is_tied=fields.flag("tie_word_embeddings"),
        norms_per_layer=4 if family == "gemma3_text" else 2,
        num_mtp=fields.number("num_nextn_predict_layers", "num_mtp_layers", low=0, high=16, default=0)
        if family != "qwen3_moe"
        else 0,
        mtp_copies=family in MTP_COPIES,
        num_window_layers=_num_window_layers(fields, num_layers) if family == "gemma3_text" else 0,
        window=fields.number("sliding_window", high=1 << 30) if family == "gemma3_text" else 0,
        as_shipped=_as_shipped(fields, experts is not None),
    )


class _Fields:
    """Typed look-ups in a JSON object."""

    def __init__(self, raw: Any, label: str) -> None:
        if not isinstance(raw, Mapping):
            raise CommandError(f"{label}: must be a JSON object")
        self.raw = raw
        self.label = label

    def inner(self) -> "_Fields":
        """The text part, if this is a config of several parts."""
        kind = self.raw.get("model_type")
        if kind not in ("gemma3", "kimi_k25"):
            return _Fields({**GEMMA_DEFAULTS, **self.raw}, self.label) if kind == "gemma3_text" else self
        text = dict(_Fields(self.raw.get("text_config"), f"{self.label}: text_config").raw)
        if kind == "gemma3":
            text = {**GEMMA_DEFAULTS, **text, "model_type": "gemma3_text"}
        else:
            text["model_type"] = "kimi_k2"
        if text.get("quantization_config") is None:
            text["quantization_config"] = self.raw.get("quantization_config")
        return _Fields(text, self.label)

    def number(self, *names: str, low: int = 1, high: int = MAX_SIZE, default: int | None = None) -> int:
        """A whole number in [low, high], under the first of `names` that is there."""
        value = next((self.raw[name] for name in names if self.raw.get(name) is not None), default)
        if value is None:
            raise CommandError(f"{self.label}: {names[0]} is missing")
        if type(value) is not int or not low <= value <= high:
            raise CommandError(
                f"{self.label}: {names[0]} must be a whole number from {low} to {high}, got {_brief(value)}"
            )
        return value

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and type(value) is not bool:
            raise CommandError(f"{self.label}: {name} must be true or false, got {_brief(value)}")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.raw.get(name)
        if not isinstance(value, str):
            raise CommandError(f"{self.label}: {name} must be a text, got {_brief(value)}")
        return value

    def texts(self, name: str, length: int) -> list[str] | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(each, str) for each in value):
            raise CommandError(f"{self.label}: {name} must be a list of {length} texts, one for each layer")
        return value


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _grouped(fields: _Fields, family: str) -> GroupedAttention:
    num_heads = fields.number("num_attention_heads", high=4096)
    num_kv_heads = fields.number("num_key_value_heads", high=4096, default=num_heads)
    if num_heads % num_kv_heads:
        raise CommandError(f"{fields.label}: {num_heads} heads are no multiple of {num_kv_heads} kv heads")
    has_bias = fields.flag("attention_bias")
    return GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.number("head_dim", high=4096, default=max(1, fields.number("hidden_size") // num_heads)),
        has_qkv_bias=has_bias or family == "qwen2",
        has_out_bias=has_bias and family != "glm4_moe",
        has_head_norms=family in ("qwen3", "qwen3_moe", "gemma3_text") or fields.flag("use_qk_norm"),
    )


def _latent(fields: _Fields) -> LatentAttention:
    rank = fields.raw.get("q_lora_rank")
    return LatentAttention(
        num_heads=fields.number("num_attention_heads", high=4096),
        q_rank=None if rank is None else fields.number("q_lora_rank"),
        kv_rank=fields.number("kv_lora_rank"),
        nope_dim=fields.number("qk_nope_head_dim"),
        rope_dim=fields.number("qk_rope_head_dim"),
        value_dim=fields.number("v_head_dim"),
    )


def _experts(fields: _Fields, family: str) -> Experts | None:
    if family not in (*LATENT, "glm4_moe", "qwen3_moe"):
        return None
    num_layers = fields.number("num_hidden_layers", high=1024)
    num_experts = fields.number("n_routed_experts", "num_experts", "num_local_experts", high=1 << 16)
    num_chosen = fields.number("num_experts_per_tok", high=1 << 16)
    if num_chosen > num_experts:
        raise CommandError(f"{fields.label}: num_experts_per_tok {num_chosen} is more than {num_experts} experts")
    size = fields.number("moe_intermediate_size")
    if family == "qwen3_moe":
        step = fields.number("decoder_sparse_step", high=1024, default=1)
        listed = fields.raw.get("mlp_only_layers") or []
        if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
            raise CommandError(f"{fields.label}: mlp_only_layers must be a list of whole numbers")
        only = set(listed)
        sparse = sum(1 for layer in range(num_layers) if layer not in only and (layer + 1) % step == 0)
        return Experts(sparse, num_experts, num_chosen, size, 0, has_correction_bias=False)
    first = fields.number("first_k_dense_replace", low=0, high=1024, default=1 if family == "glm4_moe_lite" else 0)
    every = fields.number("moe_layer_freq", high=1024, default=1)
    kinds = fields.texts("mlp_layer_types", num_layers)
    if kinds is not None:
        sparse = kinds.count("sparse")
    else:
        sparse = sum(1 for layer in range(num_layers) if layer >= first and layer % every == 0)
    shared = fields.number("n_shared_experts", low=0, high=1024, default=0)
    return Experts(sparse, num_experts, num_chosen, size, shared * size, has_correction_bias=True)


def _indexer(fields: _Fields, num_layers: int) -> Indexer:
    """Which layers own an indexer is listed, or follows from a period, as in transformers' GlmMoeDsaConfig."""
    kinds = fields.texts("indexer_types", num_layers)
    if kinds is None:
        every = fields.number("index_topk_freq", high=1024, default=1)
        offset = fields.number("index_skip_topk_offset", low=0, high=1024, default=2)
        owners = sum(1 for layer in range(num_layers) if max(layer - offset + 1, 0) % every == 0)
    else:
        owners = kinds.count("full")
    return Indexer(
        num_heads=fields.number("index_n_heads", high=4096),
        head_dim=fields.number("index_head_dim", high=4096),
        top_k=fields.number("index_topk", high=1 << 30),
        num_owners=owners,
    )


def _num_window_layers(fields: _Fields, num_layers: int) -> int:
    kinds = fields.texts("layer_types", num_layers)
    if kinds is not None:
        return kinds.count("sliding_attention")
    pattern = fields.number("sliding_window_pattern", high=1024, default=6)
    return sum(1 for layer in range(num_layers) if (layer + 1) % pattern)


def _as_shipped(fields: _Fields, has_experts: bool) -> str:
    """The precision policy that quantization_config describes, or "unknown": then it must be given."""
    given = fields.raw.get("quantization_config")
    if given is None:
        return "bf16"
    quantization = _Fields(given, f"{fields.label}: quantization_config")
    method = quantization.text("quant_method")
    if method == "fp8":
        return "fp8"
    if method in ("gptq", "awq"):
        bits, size = quantization.raw.get("bits"), quantization.raw.get("group_size")
        return f"int4-g{size}" if bits == 4 and size in (32, 64, 128) else "unknown"
    if method != "compressed-tensors":
        return "unknown"
    return _compressed_tensors(quantization.raw, has_experts)


def _compressed_tensors(raw: Mapping[str, Any], has_experts: bool) -> str:
    groups = raw.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    if len(weights) != 1 or not isinstance(weights[0], dict):
        return "unknown"
    bits, size, kind = (weights[0].get(name) for name in ("num_bits", "group_size", "type"))
    if bits != 4 or size not in (32, 64, 128) or kind not in ("int", None):
        return "unknown"
    skipped = str(raw.get("ignore") or "")
    return f"int4-g{size}/bf16" if has_experts and "self_attn" in skipped else f"int4-g{size}"
