"""Rotary frequencies are those of transformers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.model.config import ModelConfig, RopeScaling
from worker.model.errors import ModelError
from worker.model.hf_fields import Fields, rope_scaling
from worker.model.rope import inverse_frequencies

LLAMA = ModelConfig(
    architecture="llama", num_layers=1, hidden_size=512, num_heads=4, num_kv_heads=4, head_dim=128, ffn_size=8,
    vocab_size=8, context_length=131072, rms_eps=1e-5, rope_theta=500000.0, rope_scaling=None, tie_embeddings=True,
)  # fmt: skip
LLAMA_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES: dict[str, tuple[RopeScaling | None, dict[str, Any]]] = {
    "none": (None, {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 2.5), {"rope_type": "linear", "factor": 2.5}),
    "llama 3.1": (RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), {"rope_type": "llama3", **LLAMA_3_1}),
    "llama 3.2": (RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), {"rope_type": "llama3", **LLAMA_3_1, "factor": 32.0}),
    "yarn": (
        RopeScaling("yarn", 4.0, original_context=32768, attention_factor=0.1 * math.log(4.0) + 1.0),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn of deepseek": (
        RopeScaling("yarn", 40.0, original_context=4096, beta_fast=16.0, beta_slow=2.0, mscale_all_dim=0.707, attention_factor=1.0),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0,
         "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "yarn with mscale": (
        RopeScaling("yarn", 40.0, original_context=4096, mscale_all_dim=0.5,
                    attention_factor=(0.1 * 0.8 * math.log(40) + 1) / (0.1 * 0.5 * math.log(40) + 1)),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.8, "mscale_all_dim": 0.5},
    ),
    "yarn without whole ends": (
        RopeScaling("yarn", 8.0, original_context=4096, truncate=False, attention_factor=1.25),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False, "attention_factor": 1.25},
    ),
}  # fmt: skip


def test_stored_divisors_and_linear_scaling_add_up() -> None:
    """A file that has both gets both."""
    divisors = torch.linspace(1.0, 8.0, 64)
    config = replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0))

    both = inverse_frequencies(config, divisors)

    assert torch.equal(both, inverse_frequencies(LLAMA) / divisors.double() / 4.0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scalings(case: str, head_dim: int) -> None:
    """No scaling, linear and llama3 give transformers' inverse frequencies to float32 precision."""
    scaling, parameters = CASES[case]
    theirs = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **parameters},
    )  # fmt: skip

    ours = inverse_frequencies(replace(LLAMA, rope_scaling=scaling, head_dim=head_dim))

    rotary = LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(rotary.inv_freq, ours.float(), rtol=1e-6, atol=0)
    read = rope_scaling(Fields(parameters, "a-file"), 131072)
    assert read == scaling
    assert (1.0 if read is None else read.attention_factor) == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0), ("hidden_size", 1 << 21), ("num_layers", 0), ("num_layers", 1 << 20), ("vocab_size", -1),
        ("num_kv_heads", 3), ("num_kv_heads", 0), ("head_dim", 12), ("head_dim", 264), ("context_length", 0),
        ("context_length", 1 << 40), ("rms_eps", float("nan")), ("rms_eps", -1.0), ("rope_theta", float("inf")),
        ("rope_theta", 0.0),
    ],
)  # fmt: skip
def test_impossible_numbers(field: str, value: float) -> None:
    """A number that no model has is refused with the file's name before anything is allocated for it."""
    with pytest.raises(ModelError, match="a-file"):
        replace(LLAMA, **{field: value}).check("a-file")
