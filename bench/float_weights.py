"""The weights of a GGUF file as plain floats, in Hugging Face's layout: for peers that read no GGUF, and as the truth for quality.

Read by the `gguf` package, not by the worker's own reader, so that the two check each other.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file

from worker.model.config import ModelConfig
from worker.model.load import open_checkpoint

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def float_state(path: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """All tensors by their names in transformers, dequantized."""
    config = _config(path)
    return {
        _name(tensor.name): _values(tensor, config).to(_DTYPES[dtype]).contiguous()
        for tensor in gguf.GGUFReader(path).tensors
    }


def folder_config(path: Path, dtype: str = "float32") -> dict[str, Any]:
    """What config.json of the folder holds."""
    config = _config(path)
    if config.rope_scaling is not None:
        raise ValueError(f"{path}: rope scaling is not supported here")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": dtype,
        "hidden_size": config.hidden_size, "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length, "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _config(path: Path) -> ModelConfig:
    config = open_checkpoint(path).config
    if config.architecture != "llama":
        raise ValueError(f"{path}: only llama is supported here, not {config.architecture}")
    return config


def write_folder(path: Path, folder: Path, dtype: str) -> Path:
    """Write the model into a folder, unless it's there; returns the folder."""
    done = folder / "config.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(float_state(path, dtype), folder / "model.safetensors", metadata={"format": "pt"})
        done.write_text(json.dumps(folder_config(path, dtype)), encoding="utf-8")
    return folder


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, role, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[role]}.{kind}"


def _values(tensor: gguf.ReaderTensor, config: ModelConfig) -> torch.Tensor:
    """Float32, with rows of Q and K back in the order that transformers expects."""
    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(tensor.name.split(".")[-2], 0)
    if num_heads:
        pairs = values.view(num_heads, config.head_dim // 2, 2, -1)
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values
