"""The qwen2 architecture (Qwen2, Qwen2.5): llama with biases on queries, keys and values (Yang et al., 2024). Built as llama is."""

from dataclasses import replace

from worker.model import llama
from worker.model.config import ModelConfig
from worker.model.hf_fields import Fields, decoder_config, late_windows

NAMES = llama.NAMES


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a qwen2's config.json. Layers from `max_window_layers` on may have a window."""
    fields.require(hidden_act="silu")
    fields.refuse_others("use_sliding_window", "layer_types")
    config = decoder_config(fields)
    return replace(config, qkv_bias=True, windows=late_windows(fields, config.num_layers))
