"""Random models of odd shapes give the logits that transformers gives for the same weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kernels.backend import Backend
from worker.model.load import load_model

TOKENS = [258, *(3 + 11 * i % 250 for i in range(40))]
# The 16-bit activations of the native kernels make some keys and values round to the other neighbour in bfloat16.
TOLERANCE = {Backend.REF: 5e-4, Backend.CPU: 2e-3}
Make = Callable[..., Any]
SHAPES: dict[str, dict[str, Any]] = {
    "as many kv heads as heads": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "3 heads to a kv head": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "heads wider than hidden": {"head_dim": 32},
    "small heads": {"head_dim": 8},
    "tied head": {"tie_word_embeddings": True},
    "one layer": {"num_hidden_layers": 1},
    "odd vocabulary and ffn": {"vocab_size": 317, "intermediate_size": 100},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0
        }
    },
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        }
    },
}  # fmt: skip


def _expected(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model.float()(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_folder(
    shape: str, dtype: torch.dtype, backend: Backend, llama_in_transformers: Make, folder_of: Make, paged_run: Make,
    relative_error: Make,
) -> None:  # fmt: skip
    """A folder of safetensors computes as in transformers, of each precision and shape."""
    model = llama_in_transformers(**SHAPES[shape])
    folder = folder_of(model, dtype)

    (logits,) = paged_run(load_model(folder, backend)).feed(("a", TOKENS))

    assert relative_error(logits, _expected(model)) < TOLERANCE[backend]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", ["3 heads to a kv head", "heads wider than hidden", "tied head"])
def test_unquantized_gguf(
    kind: str, shape: str, backend: Backend, llama_in_transformers: Make, gguf_of: Make, paged_run: Make,
    relative_error: Make,
) -> None:  # fmt: skip
    """Q and K come out of their interleaved order for every GQA ratio."""
    model = llama_in_transformers(**SHAPES[shape])
    path = gguf_of(model, {"attn_q": kind, "attn_k": kind, "ffn_down": kind, "token_embd": kind})

    (logits,) = paged_run(load_model(path, backend)).feed(("a", TOKENS))

    assert relative_error(logits, _expected(model)) < TOLERANCE[backend]


MIXTURES: dict[str, Mapping[str, str]] = {
    **{kind: {"": kind} for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")},
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"},
    "q k v of three formats": {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "BF16", "": "Q5_1"},
    "Q4_0 beside Q4_1": {"ffn_gate": "Q4_0", "ffn_up": "Q4_1", "attn_k": "Q4_1", "": "Q4_0"},
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_quantized_gguf(
    mixture: str, tied: bool, backend: Backend, llama_in_transformers: Make, gguf_of: Make, paged_run: Make,
    relative_error: Make,
) -> None:  # fmt: skip
    """Every quantized format, alone and mixed so that projections can't be one matrix, gives the reference's logits."""
    model = llama_in_transformers(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    path = gguf_of(model, MIXTURES[mixture])

    (logits,) = paged_run(load_model(path, backend)).feed(("a", TOKENS))

    assert relative_error(logits, _expected(model)) < TOLERANCE[backend]


def test_frequency_divisors_of_a_gguf(
    backend: Backend, llama_in_transformers: Make, gguf_of: Make, paged_run: Make, relative_error: Make
) -> None:
    """rope_freqs.weight, which is how GGUF files carry Llama 3.1's scaling, divides the rotary frequencies."""
    model = llama_in_transformers(**SHAPES["llama3 rope"])
    plain = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.double()).float().numpy()
    path = gguf_of(model, extra={"rope_freqs.weight": divisors})

    (logits,) = paged_run(load_model(path, backend)).feed(("a", TOKENS))

    assert relative_error(logits, _expected(model)) < TOLERANCE[backend]


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
    ids=["with its type", "without a type", "by its older name"],
)
def test_linear_scaling_of_a_gguf(
    metadata: dict[str, Any], backend: Backend, llama_in_transformers: Make, gguf_of: Make, paged_run: Make,
    relative_error: Make,
) -> None:  # fmt: skip
    """The metadata of linear rope scaling is honoured."""
    model = llama_in_transformers(**SHAPES["linear rope"])
    path = gguf_of(model, metadata=metadata)

    (logits,) = paged_run(load_model(path, backend)).feed(("a", TOKENS))

    assert relative_error(logits, _expected(model)) < TOLERANCE[backend]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_activations_beyond_float16_stay_finite(
    dtype: torch.dtype, backend: Backend, llama_in_transformers: Make, folder_of: Make, paged_run: Make,
    relative_error: Make,
) -> None:  # fmt: skip
    """Hidden values of 1e6, past what float16 holds, give the reference's logits."""
    model = llama_in_transformers()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1e6)
    folder = folder_of(model, dtype)

    (logits,) = paged_run(load_model(folder, backend)).feed(("a", TOKENS))

    assert relative_error(logits, _expected(model)) < TOLERANCE[backend]


def test_tied_head_is_one_copy(llama_in_transformers: Make, gguf_of: Make) -> None:
    """A tied embedding is held once: an untied model of the same numbers takes exactly its bytes more."""
    sizes = {}
    for tied in (True, False):
        path: Path = gguf_of(llama_in_transformers(tie_word_embeddings=tied))
        sizes[tied] = load_model(path, Backend.REF).model.weight_bytes
    rows = -(-300 // 16) * 16

    assert rows * 64 * 4 == sizes[False] - sizes[True]


@pytest.mark.parametrize("rows", [[40, 3, 3], [0], []], ids=str)
def test_only_wanted_rows_get_logits(rows: list[int], backend: Backend, folder: Path, paged_run: Make) -> None:
    """Logits of chosen rows are those of all rows at these places, bit for bit; none may be wanted."""
    loaded = load_model(folder, backend)
    (everything,) = paged_run(loaded).feed(("a", TOKENS))

    logits = paged_run(loaded).forward([("a", TOKENS)], torch.tensor(rows, dtype=torch.int64))

    assert torch.equal(everything[rows], logits)
