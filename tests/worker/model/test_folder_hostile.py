"""A Hugging Face folder loads whole or not at all: one clear ModelError, and nothing outside the folder is opened."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kernels.backend import Backend
from worker.model.errors import ModelError
from worker.model.load import load_model

Make = Callable[..., Any]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, Backend.REF)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    assert str(folder) in text
    return text


def _edit(folder: Path, name: str, **fields: Any) -> None:
    """Set fields of a JSON file in the folder; None removes one."""
    path = folder / name
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    value.update(fields)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}), encoding="utf-8")


@pytest.fixture
def sharded(llama_in_transformers: Callable[..., LlamaForCausalLM], folder_of: Make) -> Path:
    """A folder with several shards, which loads."""
    folder: Path = folder_of(llama_in_transformers(), max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    load_model(folder, Backend.REF)
    return folder


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_missing_shard(sharded: Path) -> None:
    """A shard that the index lists and the folder lacks is named."""
    gone = _shards(sharded)[1]
    gone.unlink()

    assert gone.name in _refusal(sharded)


def test_missing_tensor_in_a_shard(sharded: Path) -> None:
    """A tensor that the index lists and its shard lacks is named."""
    shard = _shards(sharded)[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)

    assert name in _refusal(sharded)


def test_missing_tensor_everywhere(sharded: Path) -> None:
    """A tensor that neither index nor shards have is named."""
    shard = _shards(sharded)[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    places = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    del places[name]
    _edit(sharded, INDEX, weight_map=places)

    assert f"tensor {name!r} is missing" in _refusal(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    """A tensor that two shards hold is named, even if both agree."""
    first, second = _shards(sharded)[:2]
    tensors = load_file(first)
    name = sorted(tensors)[0]
    save_file(load_file(second) | {name: tensors[name]}, second)

    assert name in _refusal(sharded)


def test_index_points_to_the_wrong_shard(sharded: Path) -> None:
    """An index that disagrees with the shards."""
    places = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    name = sorted(places)[0]
    places[name] = next(place for place in places.values() if place != places[name])
    _edit(sharded, INDEX, weight_map=places)

    assert name in _refusal(sharded)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_missing_tensor(name: str, folder: Path) -> None:
    """A tensor that the only file lacks is named; an untied head too."""
    tensors = load_file(folder / SINGLE)
    del tensors[name]
    save_file(tensors, folder / SINGLE)

    assert f"tensor {name!r} is missing" in _refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.qweight",
    ],
)
def test_unknown_tensor(name: str, folder: Path) -> None:
    """A tensor that the architecture has no place for is named."""
    save_file(load_file(folder / SINGLE) | {name: torch.zeros(4)}, folder / SINGLE)

    assert f"unknown tensor {name!r}" in _refusal(folder)


def test_renamed_tensor(folder: Path) -> None:
    """A tensor under a wrong name is missing under the right one."""
    tensors = load_file(folder / SINGLE)
    tensors["model.norms.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / SINGLE)

    assert "'model.norm.weight' is missing" in _refusal(folder)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"]
)
def test_wrong_shape(name: str, folder: Path) -> None:
    """A tensor with a row too many is named with both shapes."""
    tensors = load_file(folder / SINGLE)
    old = tensors[name]
    tensors[name] = torch.cat([old, old[:1]])
    save_file(tensors, folder / SINGLE)

    text = _refusal(folder)

    assert name in text
    assert str(list(old.shape)) in text


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.int64], ids=str)
def test_unsupported_dtype(dtype: torch.dtype, folder: Path) -> None:
    """A matrix of a type without a meaning here is named."""
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / SINGLE)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / SINGLE)

    assert name in _refusal(folder)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_not_finite(part: str, folder: Path) -> None:
    """One NaN is found, and the error names its tensor, not one that is stacked with it."""
    name = f"model.layers.0.self_attn.{part}.weight"
    tensors = load_file(folder / SINGLE)
    tensors[name][1, 1] = float("nan")
    save_file(tensors, folder / SINGLE)

    assert name in _refusal(folder)


def test_truncated(folder: Path) -> None:
    """A weights file cut at many places."""
    raw = (folder / SINGLE).read_bytes()
    for cut in (0, 1, 7, 8, 9, 100, 1000, len(raw) // 2, len(raw) - 1):
        (folder / SINGLE).write_bytes(raw[:cut])

        assert SINGLE in _refusal(folder)


@pytest.mark.parametrize("length", [0, 1 << 30, 1 << 62, (1 << 64) - 1])
def test_header_length(length: int, folder: Path) -> None:
    """A header said to be longer than the file."""
    raw = bytearray((folder / SINGLE).read_bytes())
    raw[:8] = struct.pack("<Q", length)
    (folder / SINGLE).write_bytes(raw)

    assert SINGLE in _refusal(folder)


def test_pickle_is_not_looked_at(folder: Path) -> None:
    """Weights in a pickle are refused by name; beside the real ones they are never opened."""
    os.mkfifo(folder / "pytorch_model.bin")  # opening it would wait for ever
    load_model(folder, Backend.REF)
    (folder / SINGLE).unlink()

    assert "pytorch_model.bin: is a pickle" in _refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "MODEL.BIN"])
def test_pickle_by_name(name: str, folder: Path) -> None:
    """A pickle that the index names, or that is given as the model, is refused before it is opened."""
    os.mkfifo(folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}), encoding="utf-8")

    assert name in _refusal(folder)
    (folder / name).unlink()
    torch.save({}, folder / name)
    with pytest.raises(ModelError, match="is a pickle"):
        load_model(folder / name, Backend.REF)


def test_folder_called_like_weights(folder: Path) -> None:
    """A directory in the place of the weights file."""
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()

    _refusal(folder)


def test_empty_folder(tmp_path: Path) -> None:
    """A folder with nothing in it."""
    assert "config.json" in _refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "sub/x.safetensors",
        "a\x00b",
        "x" * 5000,
        "\n.safetensors",
    ],
)
def test_index_leads_outside(name: str, folder: Path) -> None:
    """A shard's name that is no plain file name of the folder."""
    (folder.parent / "outside.safetensors").write_bytes((folder / SINGLE).read_bytes())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}), encoding="utf-8")

    _refusal(folder)


@pytest.mark.parametrize(
    "name",
    [SINGLE, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
)
def test_link_leads_outside(name: str, folder: Path) -> None:
    """A file of the folder that is a link to one outside is not followed."""
    outside = folder.parent / "outside"
    inside = folder / name
    outside.write_bytes(inside.read_bytes() if inside.exists() else b"{}")
    inside.unlink(missing_ok=True)
    inside.symlink_to(outside)

    assert name in _refusal(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", SINGLE]
)
def test_pipe(name: str, folder: Path) -> None:
    """A named pipe among the files is refused at once: reading it would wait for ever."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)

    assert name in _refusal(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' + b"9" * 10_000 + b"}"]
)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX]
)
def test_not_json(name: str, content: bytes, folder: Path) -> None:
    """A file that is no JSON object is named."""
    (folder / name).write_bytes(content)

    assert name in _refusal(folder)


def test_template_is_not_text(folder: Path) -> None:
    """A chat template that is not UTF-8."""
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\x00{{")

    assert "chat_template.jinja" in _refusal(folder)


def test_template_too_large(folder: Path) -> None:
    """A chat template of megabytes."""
    (folder / "chat_template.jinja").write_bytes(b"x" * (1 << 21))

    assert "chat_template.jinja" in _refusal(folder)


CONFIG: dict[str, dict[str, Any]] = {
    "another architecture": {"model_type": "mixtral"},
    "no architecture": {"model_type": None},
    "gelu": {"hidden_act": "gelu"},
    "quantized by another format": {"quantization_config": {"quant_method": "gptq"}},
    "size is text": {"hidden_size": "64"},
    "size is true": {"num_hidden_layers": True},
    "size is a fraction": {"hidden_size": 64.5},
    "no size": {"intermediate_size": None},
    "0 heads": {"num_attention_heads": 0},
    "0 kv heads": {"num_key_value_heads": 0},
    "negative layers": {"num_hidden_layers": -1},
    "huge": {"hidden_size": 10**30},
    "size of 400 digits": {"head_dim": 10**400},
    "huge context": {"max_position_embeddings": 10**9},
    "eps of 400 digits": {"rms_norm_eps": 10**400},
    "theta of 400 digits": {"rope_theta": 10**400},
    "yarn of no factor": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "yarn of infinite sharpness": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": float("inf")}},
    "softcapping": {"final_logit_softcapping": 30.0},
    "dynamic": {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "scaling is a list": {"rope_parameters": None, "rope_scaling": ["linear"]},
    "scaling without a factor": {"rope_parameters": {"rope_type": "linear"}},
    "scaling by NaN": {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
    "scaling by 400 digits": {"rope_parameters": {"rope_type": "linear", "factor": 10**400}},
    "llama3 with low above high": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama3 of no context": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 0,
        }
    },
    "llama3 of a huge context": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 10**400,
        }
    },
    "part of the head rotated": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIG)
def test_config(case: str, folder: Path) -> None:
    """A configuration of a wrong type, out of range or of another kind of model stops the load."""
    _edit(folder, "config.json", **CONFIG[case])

    assert "config.json" in _refusal(folder)


@pytest.mark.parametrize("bos", [300, -1])
def test_bos_outside_the_vocabulary(bos: int, folder: Path) -> None:
    """A BOS id that only config.json names, and that no token has."""
    _edit(folder, "tokenizer.json", post_processor=None)
    _edit(folder, "tokenizer_config.json", bos_token=None, add_bos_token=True)
    _edit(folder, "config.json", bos_token_id=bos)

    assert "bos_token_id" in _refusal(folder)


TOKENIZERS: dict[str, dict[str, Any]] = {
    "no model": {"model": None},
    "no vocabulary": {"model": {"type": "BPE", "merges": []}},
    "vocabulary is a list": {"model": {"type": "BPE", "vocab": ["a"], "merges": []}},
    "unigram": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]]}},
    "wordpiece": {
        "model": {
            "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": {"a": 0},
        }
    },
    "id is text": {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
    "id is a fraction": {"model": {"type": "BPE", "vocab": {"a": 0.5}, "merges": []}},
    "id below 0": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    "id outside": {"model": {"type": "BPE", "vocab": {"a": 300}, "merges": []}},
    "id twice": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}},
    "merge to nothing": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}},
    "added id below 0": {"added_tokens": [{"id": -1, "content": "<s>", "special": True}]},
    "added id outside": {"added_tokens": [{"id": 300, "content": "<s>", "special": True}]},
    "added token without id": {"added_tokens": [{"content": "<s>"}]},
    "added tokens are text": {"added_tokens": "abc"},
    "unknown pre-tokenizer": {"pre_tokenizer": {"type": "Surprise"}},
    "bad regex": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer(case: str, folder: Path) -> None:
    """A tokenizer that would not work is found before the model is ready."""
    _edit(folder, "tokenizer.json", **TOKENIZERS[case])

    assert "tokenizer.json" in _refusal(folder)
