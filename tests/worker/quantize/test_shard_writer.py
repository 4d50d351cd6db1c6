"""Files written piece by piece are safetensors files, or don't appear."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from worker.quantize.errors import QuantizeError
from worker.quantize.shard_writer import ShardWriter, TensorLayout

TENSORS = {
    "a": torch.randn(7, 5).bfloat16(), "b": torch.arange(3), "c": torch.tensor(4.0), "d": torch.zeros(0, 4), "e": torch.randn(6, 2, 3),
    "f": torch.randn(4, 4).to(torch.float8_e4m3fn), "g": torch.tensor([1, 2, 3], dtype=torch.uint8),
}  # fmt: skip
LAYOUTS = {name: TensorLayout(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def test_rows_in_any_order(tmp_path: Path) -> None:
    """The library reads what was written; until the end the file has another name."""
    path = tmp_path / "x.safetensors"
    with ShardWriter(path, LAYOUTS) as writer:
        writer.write("a", TENSORS["a"][4:], 4)
        for name in ("g", "b", "c", "d", "e", "f"):
            writer.write(name, TENSORS[name])
        writer.write("a", TENSORS["a"][:4], 0)
        assert not path.exists()
    read = load_file(path)
    assert TENSORS.keys() == read.keys()
    assert all(torch.equal(read[name].float(), tensor.float()) for name, tensor in TENSORS.items())
    assert [path] == list(tmp_path.iterdir())


def test_a_missing_row_is_told(tmp_path: Path) -> None:
    """And no file appears."""
    with (
        pytest.raises(QuantizeError, match="tensor 'a' was not written whole"),
        ShardWriter(tmp_path / "x", {"a": LAYOUTS["a"]}) as writer,
    ):
        writer.write("a", TENSORS["a"][:4])
    assert not (tmp_path / "x").exists()
