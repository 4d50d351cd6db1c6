"""A checkpoint of random numbers in the shape of a real one: a Hugging Face folder of the llama family with INT4 weights in groups
(compressed-tensors, pack-quantized), in shards, written as it is made up. For measuring how fast such folders load, and for tests.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker.model.token_bytes import byte_level_alphabet

CONTROL_TOKENS = ("<s>", "</s>")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. The vocabulary is 256 bytes, two control tokens and padding."""

    hidden: int = 2048
    ffn: int = 5632
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    context: int = 2048
    group: int = 128

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Of one layer, by module: rows and columns."""
        head = self.hidden // self.heads
        attention = {
            "q": (self.hidden, self.hidden),
            "k": (self.kv_heads * head, self.hidden),
            "v": (self.kv_heads * head, self.hidden),
        }
        named = {
            f"self_attn.{name}_proj": shape for name, shape in (attention | {"o": (self.hidden, self.hidden)}).items()
        }
        return named | {
            "mlp.gate_proj": (self.ffn, self.hidden), "mlp.up_proj": (self.ffn, self.hidden), "mlp.down_proj": (self.hidden, self.ffn),
        }  # fmt: skip


def write_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> None:
    """One shard for the embedding and one for each layer, so that memory stays small."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    places: dict[str, str] = {}
    for number, tensors in enumerate(_shards(shape, random)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "tokenizer.json", _tokenizer())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    _write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})


def _shards(shape: Shape, random: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    embedding = torch.randn(shape.vocabulary, shape.hidden, generator=random).bfloat16() * 0.5
    yield {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(shape.hidden).bfloat16()}
    for layer in range(shape.layers):
        tensors = {}
        for module, (rows, columns) in shape.matrices.items():
            name = f"model.layers.{layer}.{module}"
            words = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), generator=random).int()
            # Codes less 8 have a standard deviation of 4.6: the products keep the size of their input.
            scale = (0.5 + torch.rand(rows, columns // shape.group, generator=random)) / (4.6 * columns**0.5)
            tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = words, scale.bfloat16()
            tensors[f"{name}.weight_shape"] = torch.tensor([rows, columns])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(shape.hidden).bfloat16()
        yield tensors


def _config(shape: Shape) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": shape.group}
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary, "max_position_embeddings": shape.context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257, "quantization_config": quantization,
    }  # fmt: skip


def _tokenizer() -> dict[str, object]:
    """Every byte is a token, and nothing else but the control tokens."""
    vocabulary = byte_level_alphabet()
    control = [
        {"id": 256 + i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate(CONTROL_TOKENS)
    ]  # fmt: skip
    model: dict[str, object] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": control, "normalizer": None, "pre_tokenizer": level,
        "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
