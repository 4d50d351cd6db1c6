"""A safetensors header is believed in nothing: whatever is inconsistent is one clear line, and costs no memory."""

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from worker.model.errors import ModelError
from worker.model.tensor_files import TensorFile, TensorFiles

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def _write(path: Path, header: Any, num_bytes: int = 24) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(num_bytes))
    return path


def _entry(**changes: Any) -> dict[str, Any]:
    entry = GOOD["a"] | changes
    return {"a": {key: value for key, value in entry.items() if value is not None}}


HEADERS: dict[str, tuple[Any, int]] = {
    "not JSON": (b"{{{{{{{{", 24),
    "not UTF-8": (b'{"\xff\xfe": 1}', 24),
    "a list": ([], 0),
    "nested deeply": (b'{"a":' + b"[" * 200_000, 24),
    "a number of 10,000 digits": (b'{"a": ' + b"9" * 10_000 + b"}", 24),
    "a name twice": (json.dumps(GOOD)[:-1].encode() + b"," + json.dumps(GOOD)[1:].encode(), 24),
    "a field twice": (b'{"a":{"dtype":"F32","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}', 24),
    "no dtype": (_entry(dtype=None), 24),
    "a field too many": (_entry(more=1), 24),
    "unknown dtype": (_entry(dtype="F4"), 24),
    "dtype is a list": (_entry(dtype=["F32"]), 24),
    "shape is text": (_entry(shape="2,3"), 24),
    "a size below 0": (_entry(shape=[-2, -3]), 24),
    "a size of true": (_entry(shape=[True, 6]), 24),
    "a fraction": (_entry(shape=[2.0, 3]), 24),
    "a product that overflows": (_entry(shape=[1 << 40, 1 << 40]), 24),
    "100 dimensions": (_entry(shape=[1] * 98 + [2, 3]), 24),
    "terabytes": (_entry(shape=[1 << 40], data_offsets=[0, 1 << 42]), 24),
    "offsets of other sizes": (_entry(data_offsets=[0, 20]), 24),
    "offsets backwards": (_entry(data_offsets=[24, 0]), 24),
    "one offset": (_entry(data_offsets=[24]), 24),
    "beyond the end": (_entry(data_offsets=[8, 32]), 24),
    "bytes left over": (GOOD, 25),
    "bytes missing": (GOOD, 23),
    "a hole": (GOOD | {"b": {"dtype": "U8", "shape": [1], "data_offsets": [25, 26]}}, 26),
    "an overlap": (GOOD | {"b": {"dtype": "U8", "shape": [2], "data_offsets": [23, 25]}}, 25),
    "the same place twice": (GOOD | {"b": GOOD["a"]}, 24),
    "no name": ({"": GOOD["a"]}, 24),
    "a name with a line": ({"a\nb": GOOD["a"]}, 24),
    "a name of 10,000 letters": ({"a" * 10_000: GOOD["a"]}, 24),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_header(tmp_path: Path, case: str) -> None:
    """One line that names the file; a claim of terabytes allocates nothing."""
    path = _write(tmp_path / "x.safetensors", *HEADERS[case])
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"x\.safetensors: [^\n]{1,600}$"):
        TensorFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_empty_tensors_and_metadata(tmp_path: Path) -> None:
    """Tensors without elements, without dimensions, and metadata are all right."""
    tensors = {"none": torch.zeros(0, 4), "one": torch.tensor(3.5), "many": torch.arange(6).view(2, 3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})

    files = TensorFiles(tmp_path, [tmp_path / "x.safetensors"], None)

    assert set(tensors) == set(files.names())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, files.read(name))
        assert tensor.dtype is files.read(name).dtype


@pytest.mark.parametrize(
    "dtype",
    ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"],
)
def test_every_type_is_read_as_the_reference_reads_it(tmp_path: Path, dtype: str) -> None:
    """Bytes come back as they are in the file, in the type that the header names."""
    from safetensors import safe_open

    size = 1 if dtype in ("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2") else int(dtype.removeprefix("B")[1:]) // 8
    raw = np.random.default_rng(0).integers(0, 2, 6 * size, dtype=np.uint8).tobytes()
    header = json.dumps({"a": {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, len(raw)]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw)

    tensor = TensorFiles(tmp_path, [path], None).read("a")

    with safe_open(path, framework="pt") as reference:
        expected = reference.get_tensor("a")
    assert (expected.dtype, expected.shape) == (tensor.dtype, tensor.shape)
    assert tensor.view(torch.uint8).numpy().tobytes() == raw


def test_cut_while_it_is_open(tmp_path: Path) -> None:
    """A file that is cut after its header was read gives an error, not a dead process."""
    path = _write(tmp_path / "x.safetensors", GOOD)
    files = TensorFiles(tmp_path, [path], None)
    os.truncate(path, path.stat().st_size - 10)

    with pytest.raises(ModelError, match="was cut while it was read"):
        files.read("a")


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """Opened files are closed with what opened them, also where the header is refused."""
    good, bad = _write(tmp_path / "good", GOOD), _write(tmp_path / "bad", GOOD, 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        TensorFile(good)
        with pytest.raises(ModelError):
            TensorFile(bad)

    assert before == len(list(Path("/proc/self/fd").iterdir()))
