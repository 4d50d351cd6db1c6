"""Tiny folders in Hugging Face's layout, made by transformers and tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from worker.quantize.texts import calibration_text

VOCAB_SIZE = 384


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A byte-level tokenizer that knows a little English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([calibration_text()[:50_000]], trainer)
    return tokenizer.to_str()


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer_json: str) -> Callable[..., Path]:
    """A factory of random llamas as folders: (name, dtype, max_shard_size, **overrides of the configuration)."""

    def make(
        name: str = "source", dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "200KB", **overrides: Any
    ) -> Path:
        folder = tmp_path / name
        settings = {
            "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.1, "eos_token_id": 1, "bos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }  # fmt: skip
        torch.manual_seed(11)
        LlamaForCausalLM(LlamaConfig(**(settings | overrides))).to(dtype).save_pretrained(
            folder, max_shard_size=max_shard_size
        )
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": "</s>"}), encoding="utf-8"
        )
        return folder

    return make
