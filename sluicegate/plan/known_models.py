"""config.json of models that are known by name, cut down to what decides sizes.

From the files in the publishers' Hugging Face repositories (named beside each), and for what these leave out from the configuration classes of
transformers 5. Sizes of several are checked against published tensor counts in tests/sluicegate/plan.
"""

from typing import Any

_DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "vocab_size": 129_280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18_432, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1, "max_position_embeddings": 163_840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_KIMI = {
    **_DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163_840, "first_k_dense_replace": 1,
    "n_routed_experts": 384, "num_nextn_predict_layers": 0, "max_position_embeddings": 262_144,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int", "symmetric": True}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}  # fmt: skip
_GLM_5 = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64, "vocab_size": 154_880,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "intermediate_size": 12_288, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1, "max_position_embeddings": 202_752,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
_GLM_4 = {
    "model_type": "glm4_moe", "num_hidden_layers": 92, "hidden_size": 5120, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_552, "attention_bias": True, "use_qk_norm": True, "intermediate_size": 12_288,
    "first_k_dense_replace": 3, "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 1536, "num_nextn_predict_layers": 1, "max_position_embeddings": 202_752,
}  # fmt: skip


def _dense(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, size: int, vocabulary: int, context: int,
    *, is_tied: bool, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": size, "vocab_size": vocabulary,
        "max_position_embeddings": context, "tie_word_embeddings": is_tied, **more,
    }  # fmt: skip


def _qwen3_moe(layers: int, hidden: int, heads: int, size: int, context: int) -> dict[str, Any]:
    more = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": size}
    return _dense("qwen3_moe", layers, hidden, heads, 4, 128, 3 * hidden, 151_936, context, is_tied=False, **more)


KNOWN: dict[str, dict[str, Any]] = {
    "kimi-k2.6": _KIMI,  # moonshotai/Kimi-K2.6, the text part
    "glm-5.2": {**_GLM_5, "index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1_048_576},  # zai-org/GLM-5.2
    "glm-5": _GLM_5,  # zai-org/GLM-5
    "glm-4.6": _GLM_4,  # zai-org/GLM-4.6; GLM-4.7 has the same sizes
    "glm-4.5-air": {  # zai-org/GLM-4.5-Air
        **_GLM_4, "num_hidden_layers": 46, "hidden_size": 4096, "use_qk_norm": False, "intermediate_size": 10_944,
        "first_k_dense_replace": 1, "n_routed_experts": 128, "moe_intermediate_size": 1408, "max_position_embeddings": 131_072,
    },
    "glm-4.7-flash": {  # zai-org/GLM-4.7-Flash
        **_GLM_5, "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
        "q_lora_rank": 768, "intermediate_size": 10_240, "first_k_dense_replace": 1, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    },
    "deepseek-v3": _DEEPSEEK,  # deepseek-ai/DeepSeek-V3
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536, 40_960),  # Qwen/Qwen3-235B-A22B
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768, 40_960),  # Qwen/Qwen3-30B-A3B
    "qwen3-32b": _dense("qwen3", 64, 5120, 64, 8, 128, 25_600, 151_936, 40_960, is_tied=False),  # Qwen/Qwen3-32B
    "qwen3-8b": _dense("qwen3", 36, 4096, 32, 8, 128, 12_288, 151_936, 40_960, is_tied=False),  # Qwen/Qwen3-8B
    "qwen3-0.6b": _dense("qwen3", 28, 1024, 16, 8, 128, 3072, 151_936, 40_960, is_tied=True),  # Qwen/Qwen3-0.6B
    "qwen2.5-7b": _dense("qwen2", 28, 3584, 28, 4, 128, 18_944, 152_064, 32_768, is_tied=False),  # Qwen/Qwen2.5-7B-Instruct
    "llama-3.1-70b": _dense("llama", 80, 8192, 64, 8, 128, 28_672, 128_256, 131_072, is_tied=False),  # meta-llama/Llama-3.1-70B
    "llama-3.1-8b": _dense("llama", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, is_tied=False),  # meta-llama/Llama-3.1-8B
    "llama-3.2-1b": _dense("llama", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, is_tied=True),  # meta-llama/Llama-3.2-1B
    # google/gemma-3-*-it; of 4b and 27b the text part
    "gemma-3-27b": _dense("gemma3_text", 62, 5376, 32, 16, 128, 21_504, 262_208, 131_072, is_tied=True, sliding_window=1024),
    "gemma-3-4b": _dense("gemma3_text", 34, 2560, 8, 4, 256, 10_240, 262_208, 131_072, is_tied=True, sliding_window=1024),
    "gemma-3-1b": _dense("gemma3_text", 26, 1152, 4, 1, 256, 6912, 262_144, 32_768, is_tied=True, sliding_window=512),
    "gemma-3-270m": _dense("gemma3_text", 18, 640, 4, 1, 256, 2048, 262_144, 32_768, is_tied=True, sliding_window=512),
    "smollm2-135m-instruct": _dense("llama", 30, 576, 9, 3, 64, 1536, 49_152, 8192, is_tied=True),  # HuggingFaceTB/SmolLM2-135M-Instruct
}  # fmt: skip
