"""The qwen3 architecture: llama with normalized heads of queries and keys (Yang et al., 2025). Built as llama is."""

from dataclasses import replace

from worker.model import llama
from worker.model.config import ModelConfig
from worker.model.hf_fields import Fields, decoder_config, late_windows

NAMES = llama.NAMES | {
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
}


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a qwen3's config.json. Layers from `max_window_layers` on may have a window."""
    fields.require(hidden_act="silu")
    fields.refuse_others("use_sliding_window", "layer_types")
    has_bias = fields.get("attention_bias", bool, False)
    config = replace(decoder_config(fields), head_dim=fields.get("head_dim", int, 128))
    windows = late_windows(fields, config.num_layers)
    return replace(config, qk_norm=True, qkv_bias=has_bias, o_bias=has_bias, windows=windows)
