"""No GGUF file, however damaged, gets further than one clear ModelError: no hang, no giant allocation, no other exception."""

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaForCausalLM

from kernels.backend import Backend
from worker.model.errors import ModelError
from worker.model.load import load_model

Make = Callable[..., Any]


def _refusal(path: Path) -> str:
    """The error's text, after a check that it is one line of bearable length that names the file."""
    with pytest.raises(ModelError) as caught:
        load_model(path, Backend.REF)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    assert str(path) in text
    return text


@pytest.fixture
def tiny(llama_in_transformers: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """A model of one layer."""
    return llama_in_transformers(num_hidden_layers=1)


@pytest.fixture
def path(tiny: LlamaForCausalLM, gguf_of: Make) -> Path:
    """A file that loads, with 4-bit, 8-bit and plain tensors."""
    good = gguf_of(tiny, {"attn_q": "Q4_1", "ffn_down": "Q5_1", "": "Q8_0"})
    load_model(good, Backend.REF)
    return good


def test_truncated_anywhere(path: Path) -> None:
    """A file cut at any of several hundred places in header, metadata, tensor table and data."""
    raw = path.read_bytes()
    data_start = gguf.GGUFReader(path).data_offset
    cuts = {*range(64), *range(64, data_start, 97), *range(data_start - 80, data_start + 80, 7)}
    cuts |= {*range(data_start, len(raw), len(raw) // 40), len(raw) - 1}
    for cut in sorted(cuts):
        path.write_bytes(raw[:cut])

        _refusal(path)


@pytest.mark.parametrize("value", [0xFF, 0x7F, 0x80], ids=hex)
def test_huge_values_anywhere_in_the_header(value: int, path: Path) -> None:
    """Eight bytes of the header replaced by a huge number, at many places: refused, or of no consequence."""
    raw = path.read_bytes()
    data_start = gguf.GGUFReader(path).data_offset
    places = {*range(0, 200), *range(200, data_start, 61), *range(data_start - 1200, data_start, 5)}
    for place in sorted(places):
        damaged = bytearray(raw)
        damaged[place : place + 8] = bytes([value]) * 8
        path.write_bytes(damaged)
        try:
            load_model(path, Backend.REF)
        except ModelError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 63), "tensors"),
        (16, struct.pack("<Q", 1 << 40), "metadata"),
        (24, struct.pack("<Q", 1 << 62), "truncated"),
        (8, struct.pack("<Q", 0), "missing"),
    ],
    ids=["magic", "version", "big-endian", "tensor count", "metadata count", "key length", "no tensors"],
)
def test_header_fields(place: int, value: bytes, message: str, path: Path) -> None:
    """Each field of the fixed header, replaced."""
    raw = bytearray(path.read_bytes())
    raw[place : place + len(value)] = value
    path.write_bytes(raw)

    assert message in _refusal(path)


def _entry(path: Path, name: str) -> int:
    """Where the tensor table's entry of a tensor begins, after its name."""
    key = struct.pack("<Q", len(name)) + name.encode()
    raw = path.read_bytes()
    assert raw.count(key) == 1
    return raw.index(key) + len(key)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, struct.pack("<I", 0), "dimensions"),
        (0, struct.pack("<I", 1 << 31), "dimensions"),
        (4, struct.pack("<Q", 1 << 63), "dimension"),
        (4, struct.pack("<Q", 0), "dimension"),
        (4, struct.pack("<Q", 128), "shape"),
        (4, struct.pack("<Q", 65), "multiple"),
        (20, struct.pack("<I", 4096), "unknown type"),
        (24, struct.pack("<Q", (1 << 64) - 32), "beyond the end"),
        (24, struct.pack("<Q", 7), "output.weight"),
    ],
    ids=["0 dimensions", "2^31 dimensions", "huge size", "size 0", "wider", "odd size", "type", "offset", "misaligned"],
)
def test_tensor_table_fields(at: int, value: bytes, message: str, path: Path) -> None:
    """Each field of a tensor's entry, replaced: the error names the tensor."""
    place = _entry(path, "output.weight") + at
    raw = bytearray(path.read_bytes())
    raw[place : place + len(value)] = value
    path.write_bytes(raw)

    text = _refusal(path)

    assert message in text
    assert "output.weight" in text


def test_every_type_number(path: Path) -> None:
    """A matrix said to be of any type there is, or isn't, is refused or read; nothing else happens."""
    raw = bytearray(path.read_bytes())
    place = _entry(path, "output.weight") + 20
    for number in (*range(64), 1 << 31, (1 << 32) - 1):
        raw[place : place + 4] = struct.pack("<I", number)
        path.write_bytes(raw)
        try:
            load_model(path, Backend.REF)
        except ModelError as error:
            assert "output.weight" in str(error)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_k.weight", "blk.0.ffn_norm.weight"]
)
def test_missing_tensor(name: str, tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """A tensor that isn't there is named."""
    assert f"tensor {name!r} is missing" in _refusal(gguf_of(tiny, without=[name]))


def test_missing_layer(tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """More layers promised than there are."""
    assert "'blk.1.attn_norm.weight' is missing" in _refusal(gguf_of(tiny, metadata={"llama.block_count": 2}))


@pytest.mark.parametrize(
    "name", ["blk.1.attn_q.weight", "blk.0.attn_q.bias", "extra.weight", "rope_factors_long.weight"]
)
def test_unknown_tensor(name: str, tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """A tensor that the architecture has no place for, such as a bias, is named."""
    path = gguf_of(tiny, extra={name: np.zeros(64, dtype=np.float32)})

    assert f"unknown tensor {name!r}" in _refusal(path)


def test_renamed_tensor(path: Path) -> None:
    """One letter of a tensor's name changed."""
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.0.attn_v.weight", b"blk.0.attn_w.weight"))

    assert "'blk.0.attn_v.weight' is missing" in _refusal(path)


def test_duplicate_tensor(path: Path) -> None:
    """The same name twice in the tensor table."""
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"))

    assert "'blk.0.attn_k.weight' occurs twice" in _refusal(path)


def test_duplicate_metadata(path: Path) -> None:
    """The same metadata key twice."""
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"llama.attention.head_count\4", b"llama.attention.key_length\4"))

    assert "occurs twice" in _refusal(path)


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K", "Q4_K", "F16"])
def test_scale_that_is_not_finite(kind: str, name: str, llama_in_transformers: Make, gguf_of: Make) -> None:
    """One bad scale (or value, in an unquantized matrix) is found, and the error names that tensor, not one stacked with it."""
    model = llama_in_transformers(num_hidden_layers=1, hidden_size=256, intermediate_size=256, head_dim=64)
    path = gguf_of(model, {"": kind})
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    place = int(tensors[f"blk.0.{name}.weight"].data_offset) + {"Q6_K": 208}.get(kind, 0)
    for value in (float("nan"), float("inf"), -float("inf")):
        raw = bytearray(path.read_bytes())
        raw[place : place + 2] = np.array([value], dtype=np.float16).tobytes()
        path.write_bytes(raw)

        text = _refusal(path)

        assert "finite" in text
        assert f"blk.0.{name}.weight" in text


@pytest.mark.parametrize("name", ["attn_norm", "ffn_norm"])
def test_norm_that_is_not_finite(name: str, tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """NaN in a norm's weight."""
    dict(tiny.named_parameters())[
        "model.layers.0." + {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}[name] + ".weight"
    ].data[3] = float("nan")

    assert f"blk.0.{name}.weight" in _refusal(gguf_of(tiny))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")], ids=str)
def test_frequency_divisors(value: float, tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """A rotary frequency can't be divided by zero, NaN or a negative number."""
    divisors = np.ones(8, dtype=np.float32)
    divisors[2] = value

    assert "rope_freqs.weight" in _refusal(gguf_of(tiny, extra={"rope_freqs.weight": divisors}))


METADATA: dict[str, dict[str, Any]] = {
    "another architecture": {"general.architecture": "mamba"},
    "no architecture's numbers": {"llama.embedding_length": None},
    "size is text": {"llama.block_count": "30"},
    "0 heads": {"llama.attention.head_count": 0},
    "0 kv heads": {"llama.attention.head_count_kv": 0},
    "huge hidden size": {"llama.embedding_length": 2**32 - 1},
    "huge layer count": {"llama.block_count": 2**32 - 1},
    "huge context": {"llama.context_length": 2**32 - 1},
    "huge head": {"llama.attention.key_length": 2**31},
    "eps is NaN": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "theta is infinite": {"llama.rope.freq_base": float("inf")},
    "yarn": {"llama.rope.scaling.type": "yarn"},
    "scaling by 0": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
    "scaling without a type, out of range": {"llama.rope.scaling.factor": 0.5},
    "attn_factor": {"llama.rope.scaling.attn_factor": 0.5},
    "clamped": {"llama.attention.clamp_kqv": 8.0},
    "scaled logits": {"llama.logit_scale": 0.25},
    "scaled embeddings": {"llama.embedding_scale": 12.0},
    "partial rotary": {"llama.rope.dimension_count": 8},
    "experts": {"llama.expert_count": 8},
    "alignment 3": {"general.alignment": 3},
    "no tokens": {"tokenizer.ggml.tokens": None},
    "tokens are numbers": {"tokenizer.ggml.tokens": [1, 2, 3]},
    "tokenizer of another kind": {"tokenizer.ggml.model": "bert"},
    "no tokenizer": {"tokenizer.ggml.model": None},
    "pre-tokenizer of another kind": {"tokenizer.ggml.pre": "tekken"},
    "types of too few": {"tokenizer.ggml.token_type": [1, 2]},
    "merge of one": {"tokenizer.ggml.merges": ["he"]},
    "merge of nothing": {"tokenizer.ggml.merges": ["h e", " "]},
    "merge to a token that isn't there": {"tokenizer.ggml.merges": ["h e", "h f"]},
    "merge of a token that isn't there": {"tokenizer.ggml.merges": ["h xyz"]},
    "bos outside": {"tokenizer.ggml.bos_token_id": 300},
    "eos outside": {"tokenizer.ggml.eos_token_id": 2**32 - 1},
    "template is a number": {"tokenizer.chat_template": 5},
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata(case: str, tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """Metadata of a wrong type, out of range or of another kind of model stops the load."""
    _refusal(gguf_of(tiny, metadata=METADATA[case]))


def test_repeated_token(tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """A vocabulary with a token twice would lose an id."""
    tokens = [f"t{i}" for i in range(300)]
    tokens[7] = tokens[9]

    assert "twice" in _refusal(gguf_of(tiny, metadata={"tokenizer.ggml.tokens": tokens}))


def _header_of(*entries: tuple[str, int, bytes]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    return head + b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value for key, kind, value in entries
    )


ARRAY, UINT8, STRING = 9, 0, 8


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", UINT8, 1 << 60),
        struct.pack("<IQ", STRING, 1 << 60),
        struct.pack("<IQ", ARRAY, 1 << 60),
        struct.pack("<IQ", 99, 4) + bytes(64),
        b"".join(itertools.repeat(struct.pack("<IQ", ARRAY, 1), 5000)),
        struct.pack("<IQ", STRING, 2) + struct.pack("<Q", 1 << 63),
    ],
    ids=["bytes", "strings", "arrays", "unknown element type", "5000 deep", "string length"],
)
def test_arrays_that_promise_too_much(value: bytes, tmp_path: Path) -> None:
    """Counts and nesting far beyond the file."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(_header_of(("k", ARRAY, value)))

    assert "'k'" in _refusal(path)


def test_key_of_a_megabyte(tmp_path: Path) -> None:
    """A key as large as the file is not repeated in the message."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(_header_of(("k" * (1 << 20), 77, b"")))

    _refusal(path)


def test_key_with_line_ends(tmp_path: Path) -> None:
    """Control characters of the file don't reach the log as such."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(_header_of(("a\nb\x1b[31m", 77, b"")))

    assert "\x1b" not in _refusal(path)


def test_array_in_the_file_takes_no_multiple_of_it(tmp_path: Path) -> None:
    """An array of 20 million bytes, which no model has, is refused without 20 million Python objects."""
    import tracemalloc

    path = tmp_path / "hostile.gguf"
    size = 20_000_000
    path.write_bytes(_header_of(("k", ARRAY, struct.pack("<IQ", UINT8, size) + bytes(size))))
    tracemalloc.start()
    try:
        _refusal(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1.5 * size


def test_context_length_allocates_nothing_by_itself(tiny: LlamaForCausalLM, gguf_of: Make) -> None:
    """A context length that no file can back up is refused, instead of a rotary table of gigabytes."""
    assert "context_length" in _refusal(gguf_of(tiny, metadata={"llama.context_length": 1 << 24}))


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"PK\x03\x04" + bytes(100), b"\x80\x04\x95" + bytes(100)])
def test_something_else(content: bytes, tmp_path: Path) -> None:
    """An empty file, a stump, an archive and a pickle are no models."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    _refusal(path)


def test_no_file(tmp_path: Path) -> None:
    """A path that leads nowhere."""
    assert "no such file" in _refusal(tmp_path / "absent.gguf")


def test_pipe(tmp_path: Path) -> None:
    """A named pipe is refused at once: reading it would wait for ever."""
    import os

    path = tmp_path / "model.gguf"
    os.mkfifo(path)

    _refusal(path)
