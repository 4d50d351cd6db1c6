"""Tensor counts against transformers' own models, built without memory for their weights; their configs are read as saved."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from sluicegate.plan.known_models import KNOWN
from sluicegate.plan.parts import parts
from sluicegate.plan.read_config import find_shape

_LATENT = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "num_hidden_layers": 5, "first_k_dense_replace": 2, "vocab_size": 301, "intermediate_size": 130,
    "moe_intermediate_size": 34, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GROUPED = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "num_hidden_layers": 5, "vocab_size": 301,
    "intermediate_size": 130,
}  # fmt: skip
_MOE = {**_GROUPED, "moe_intermediate_size": 34, "num_experts_per_tok": 3}
CASES = {
    "llama": ("llama", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-bias": ("llama", {**_GROUPED, "attention_bias": True}),
    "mistral": ("mistral", _GROUPED),
    "qwen2": ("qwen2", {key: value for key, value in _GROUPED.items() if key != "head_dim"}),
    "qwen3": ("qwen3", _GROUPED),
    "qwen3-tied": ("qwen3", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "gemma3_text": ("gemma3_text", {**_GROUPED, "sliding_window": 40}),
    "glm4_moe": ("glm4_moe", {**_MOE, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v3-no-q-rank": ("deepseek_v3", {**_LATENT, "q_lora_rank": None}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}),
    "glm_moe_dsa-shared": (
        "glm_moe_dsa",
        {**_LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8, "indexer_types": ["full", "full", "shared", "shared", "full"]},
    ),
}  # fmt: skip


def _num_tensors_values(config: transformers.PretrainedConfig) -> int:
    """Parameters, and the routers' correction biases, which transformers keeps as buffers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = (tensor.numel() for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(parameter.numel() for parameter in model.parameters()) + sum(buffers)


def _without_prediction(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    if hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers = 0
    return config


@pytest.mark.parametrize("case", CASES)
def test_small_models(case: str, tmp_path: Path) -> None:
    """Odd sizes, every feature: as many numbers as transformers' model has, of the config.json that transformers writes."""
    family, settings = CASES[case]
    config = _without_prediction(transformers.AutoConfig.for_model(family, **settings))
    config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    assert _num_tensors_values(config) == sum(part.num_parameters for part in parts(shape) if not part.is_mtp)


@pytest.mark.parametrize(
    "name",
    [
        "glm-4.5-air",
        "qwen3-30b-a3b",
        "qwen3-0.6b",
        "llama-3.2-1b",
        "gemma-3-1b",
        "glm-4.7-flash",
        "smollm2-135m-instruct",
    ],
)
def test_whole_models(name: str) -> None:
    """Built-in models at their full size."""
    raw = {
        key: value
        for key, value in KNOWN[name].items()
        if key not in ("num_nextn_predict_layers", "quantization_config")
    }
    if "first_k_dense_replace" in raw and raw["model_type"] == "glm4_moe_lite":
        num_dense = raw["first_k_dense_replace"]
        raw["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (raw["num_hidden_layers"] - num_dense)
    family = raw.pop("model_type")
    config = _without_prediction(transformers.AutoConfig.for_model(family, **raw))
    assert _num_tensors_values(config) == sum(
        part.num_parameters for part in parts(find_shape(name)) if not part.is_mtp
    )


def test_kv_values_are_what_a_cache_holds(tmp_path: Path) -> None:
    """Bytes of KV against the cache of a small model that ran: keys and values of all layers."""
    config = transformers.AutoConfig.for_model("qwen3", **_GROUPED)
    model = transformers.AutoModelForCausalLM.from_config(config)
    cache = model(torch.arange(7)[None], use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    assert held == 7 * shape.num_layers * shape.attention.kv_values_per_token


def test_multimodal_configs_are_read_for_their_text_part(tmp_path: Path) -> None:
    """A Gemma config that leaves out what its class assumes gives the text model's sizes."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    )
    found, known = find_shape(str(tmp_path)), find_shape("gemma-3-4b")
    assert parts(known) == parts(found)
    assert (known.num_window_layers, known.window) == (found.num_window_layers, found.window) == (29, 1024)
