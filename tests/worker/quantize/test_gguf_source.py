"""A GGUF file as a source: the same weights, configuration and tokenizer as a folder."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoTokenizer

from worker.model.folder_tokenizer import tokenizer_from_folder
from worker.model.load import open_checkpoint
from worker.quantize.gguf_source import GgufSource


@pytest.fixture(scope="module")
def source(smollm2_path: Path) -> GgufSource:
    """SmolLM2 as a source."""
    return GgufSource(smollm2_path)


def test_weights_are_what_the_gguf_package_reads(source: GgufSource, smollm2_path: Path) -> None:
    """By their names in a folder, rows of queries and keys in a folder's order; a part of a tensor is that part."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    assert len(tensors) == len(source.tensors)
    for name, stored, heads in (
        ("model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight", 9), ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", 0), ("model.norm.weight", "output_norm.weight", 0),
    ):  # fmt: skip
        values = torch.from_numpy(gguf.dequantize(tensors[stored].data, tensors[stored].tensor_type).copy())
        if heads:
            values = values.view(heads, 32, 2, -1).transpose(1, 2).reshape(values.shape)
        shape = source.tensors[name].layout.shape
        assert tuple(values.shape) == shape
        assert torch.equal(values.bfloat16(), source.rows(name, 0, shape[0]))
        assert torch.equal(values[5:9].bfloat16(), source.rows(name, 5, 9))


def test_the_tokenizer_comes_back(source: GgufSource, smollm2_path: Path, tmp_path: Path) -> None:
    """Our reader of folders finds the tokenizer that our reader of GGUF found, and transformers cuts text alike."""
    source.write_companions(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(source.config)))
    wanted = open_checkpoint(smollm2_path).tokenizer
    found = tokenizer_from_folder(tmp_path, wanted.vocab_size, dict(source.config))

    assert json.loads(wanted.tokenizer_json)["model"]["vocab"] == json.loads(found.tokenizer_json)["model"]["vocab"]
    assert (wanted.control_tokens, wanted.text_tokens, wanted.eos_token_ids) == (
        found.control_tokens,
        found.text_tokens,
        found.eos_token_ids,
    )
    assert (wanted.bos_token_id, wanted.add_bos, wanted.chat_template) == (
        found.bos_token_id,
        found.add_bos,
        found.chat_template,
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello, world!  naïve café — 日本語\n\n\tx = 12345"
    assert gguf_ids(wanted.tokenizer_json, text) == theirs.encode(text, add_special_tokens=False)
    assert [1] == theirs.encode("<|im_start|>", add_special_tokens=False)


def gguf_ids(tokenizer_json: str, text: str) -> list[int]:
    """Text by the tokenizer that our GGUF reader made."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_str(tokenizer_json).encode(text, add_special_tokens=False).ids)
