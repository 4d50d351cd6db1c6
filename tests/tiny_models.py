"""Tiny random models of each architecture, made and saved with transformers' own classes, with all features on and odd sizes."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

VOCAB_SIZE = 300
_BYTES_IN_TEXT = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]


def _rounding_attention(dtype: torch.dtype) -> Any:
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        """transformers' own attention, over keys and values rounded as a pool stores them."""
        return eager_attention_forward(module, query, key.to(dtype).float(), value.to(dtype).float(), *args, **options)

    return attend


STORED = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}  # no pool has the last one, which rounds nothing
for _name, _dtype in STORED.items():
    AttentionInterface.register(f"sluicegate_{_name}_kv", _rounding_attention(_dtype))
    AttentionMaskInterface.register(f"sluicegate_{_name}_kv", eager_mask)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.15,
    "eos_token_id": 259, "bos_token_id": 258, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LATENT = {
    "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12, "q_lora_rank": 36, "kv_lora_rank": 44, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12, "v_head_dim": 28, "attention_bias": True, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 36, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
# Class name (before Config and ForCausalLM), and settings.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_ROPE, "attention_bias": True, "mlp_bias": True}),
    "qwen2": (
        "Qwen2",
        {
            **_ROPE, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 16, "use_sliding_window": True,
            "sliding_window": 20, "max_window_layers": 2, "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {**_ROPE, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_ROPE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True,
            "mlp_only_layers": [1], "decoder_sparse_step": 1,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7, "head_dim": 40, "sliding_window": 20, "query_pre_attn_scalar": 90, "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 36, "n_shared_experts": 2,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
            },
            "n_group": 3, "topk_group": 2, "num_nextn_predict_layers": 1,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **_LATENT, **_ROPE, "initializer_range": 0.12, "index_topk": 11, "index_head_dim": 24, "index_n_heads": 18, "n_group": 1,
            "topk_group": 1, "indexer_types": ["full", "shared", "full"],
        },
    ),
}  # fmt: skip


def make(architecture: str, kv_dtype: str = "fp16", **overrides: Any) -> PreTrainedModel:
    """A random float32 model whose attention rounds keys and values to `kv_dtype`."""
    name, settings = ARCHITECTURES["deepseek_v3" if architecture == "kimi_k25" else architecture]
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**(_SIZES | settings | overrides))
    is_latent = hasattr(config, "kv_lora_rank")
    config._attn_implementation = "eager" if is_latent else f"sluicegate_{kv_dtype}_kv"
    torch.manual_seed(7)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    offset = 1.0 if name == "Gemma3" else 0.0
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "norm" in label:
                parameter.uniform_(0.5 - offset, 1.5 - offset)
            elif label.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
        for label, buffer in model.named_buffers():
            if label.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    if is_latent:
        _round_latents(model, STORED[kv_dtype])
    return model


class _RoundingCache:
    """A cache without a past that stores an indexer's keys as a pool does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return keys.to(self._dtype).float()


def _round_latents(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Have latent vectors, their rotated parts and indexers' keys rounded as a pool stores them, before anything is made of them."""
    for layer in model.model.layers:
        attention, indexer = layer.self_attn, getattr(layer.self_attn, "indexer", None)

        def expand(latent: Any, turned: Any, expand_kv: Any = attention.expand_kv) -> Any:
            return expand_kv(latent.to(dtype).float(), turned.to(dtype).float())

        attention.expand_kv = expand
        if indexer is not None:

            def choose(*args: Any, forward: Any = indexer.forward, **options: Any) -> Any:
                return forward(*args, **(options | {"cache": _RoundingCache(dtype)}))

            indexer.forward = choose


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
    """A folder in Hugging Face's layout with a byte-level tokenizer."""
    for parameter in model.parameters():  # buffers, such as rotary frequencies, keep their precision
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    tokenizer = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_document()), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


_GGUF = {"qwen2": "QWEN2", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "gemma3": "GEMMA3"}


def save_gguf(model: PreTrainedModel, architecture: str, path: Path, kind: str = "F32", **metadata: Any) -> Path:
    """A GGUF file with the names of the `gguf` package; matrices are of this kind, and the model is given what they mean."""
    arch = gguf.MODEL_ARCH[_GGUF[architecture]]
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_metadata(writer, _metadata(model, gguf.MODEL_ARCH_NAMES[arch]) | metadata)
    for name, parameter in model.named_parameters():
        is_plain = parameter.ndim == 1 or name.endswith("mlp.gate.weight")
        quantization = gguf.GGMLQuantizationType["F32" if is_plain else kind]
        raw = gguf.quantize(parameter.detach().numpy(), quantization)
        parameter.data.copy_(torch.from_numpy(gguf.dequantize(raw, quantization).copy()).view(parameter.shape))
        if architecture == "gemma3" and "norm" in name:
            raw = raw + np.float32(1)  # as llama.cpp's converter stores them
        for source, part in _by_matrix(name, raw):
            module, _, ending = source.rpartition(".")
            writer.add_tensor(f"{names.get_name(module)}.{ending}", part, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _by_matrix(name: str, raw: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """transformers holds gate and up of all experts in one tensor."""
    if name.endswith("experts.gate_up_proj"):
        halves = np.split(raw, 2, axis=1)
        parts = zip(("gate_proj", "up_proj"), halves, strict=True)
        return [(name.replace("gate_up_proj", f"{part}.weight"), np.ascontiguousarray(half)) for part, half in parts]
    return [(name + ".weight" if name.endswith("experts.down_proj") else name, raw)]


def _metadata(model: PreTrainedModel, prefix: str) -> dict[str, Any]:
    """What a converter would say of the model."""
    config = model.config
    rope = config.rope_parameters
    own = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }  # fmt: skip
    if prefix == "gemma3":
        own |= {
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        }
    if prefix == "qwen3moe":
        own |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    tokens = [*byte_alphabet(), "he", "ll", "<s>", "</s>", "<|turn|>"]
    tokens += [f"[PAD{i}]" for i in range(config.vocab_size - len(tokens))]
    tokenizer = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * 258 + [3] * 3 + [5] * (config.vocab_size - 261),
        "merges": ["h e", "l l"], "bos_token_id": 258, "eos_token_id": 259,
    }  # fmt: skip
    return {f"{prefix}.{key}": value for key, value in own.items()} | {
        f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()
    }


def _add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    adders = {list: writer.add_array, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        adders[type(value)](key, value)


def byte_alphabet() -> list[str]:
    """GPT-2's 256 printable stand-ins, in byte order, from its published definition."""
    others = [byte for byte in range(256) if byte not in _BYTES_IN_TEXT]
    stand_in = {byte: chr(byte) for byte in _BYTES_IN_TEXT} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_in[byte] for byte in range(256)]


def tokenizer_document() -> dict[str, Any]:
    """A byte-level tokenizer.json with two merges and three control tokens after the ordinary tokens."""
    vocabulary = {character: index for index, character in enumerate([*byte_alphabet(), "he", "ll"])}
    control = ["<s>", "</s>", "<|turn|>"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocabulary) + i, "content": text, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for i, text in enumerate(control)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [258], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [["h", "e"], ["l", "l"]],
        },
    }  # fmt: skip
