"""Scales of an FP8 KV cache: where they come from, whose they are, and that bad ones are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kernels.kv_layout import KvLayout
from worker.kv_scales import FILE, KvScales, choose, default_file, read, write
from worker.model.errors import ModelError

LAYOUT = KvLayout(num_layers=3, num_pages=2, num_kv_heads=2, head_dim=16, page_size=8, dtype="fp8")
HALF = KvLayout(num_layers=3, num_pages=2, num_kv_heads=2, head_dim=16, page_size=8, dtype="fp16")
DIGEST = "ab" * 32


def _scales(value: float = 0.25) -> KvScales:
    return KvScales(torch.full((3, 2), value), torch.full((3, 2), 2 * value), "calibrated")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder; nothing in it is read here."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def test_a_file_comes_back(tmp_path: Path) -> None:
    """All bits of it, and only for its own model."""
    path = tmp_path / "scales"
    write(path, _scales(), DIGEST, {"tokens": "512"})
    found = read(path, DIGEST, LAYOUT)
    assert torch.equal(found.k, _scales().k)
    assert torch.equal(found.v, _scales().v)
    with pytest.raises(ModelError, match="its scales are for another model"):
        read(path, "cd" * 32, LAYOUT)
    with pytest.raises(ModelError, match=r"tensor 'k_scale' must be float32 \[4, 2\]"):
        read(path, DIGEST, KvLayout(4, 2, 2, 16, 8, "fp8"))


def test_which_scales_are_used(model: Path) -> None:
    """auto: the file beside the model, else the checkpoint's, else 1; a cache of 16 bits has none."""
    stored = KvScales(torch.full((3, 2), 0.5), torch.full((3, 2), 0.5), "checkpoint")
    used = {
        (choice, bool(own)): choose(choice, model, DIGEST, LAYOUT, own).origin
        for choice in ("auto", "1")
        for own in (None, stored)
    }
    assert {("auto", False): "1", ("auto", True): "checkpoint", ("1", False): "1", ("1", True): "1"} == used
    assert stored is choose("checkpoint", model, DIGEST, LAYOUT, stored)
    write(default_file(model), _scales(), DIGEST, {})
    assert model.with_name(f"model.{FILE}") == default_file(model)
    assert "calibrated" == choose("auto", model, DIGEST, LAYOUT, stored).origin
    assert "calibrated" == choose(str(default_file(model)), model, DIGEST, LAYOUT, stored).origin
    assert "1.0" == choose("auto", model, DIGEST, HALF, stored).fingerprint
    for choice, layout, own, named in (
        ("checkpoint", LAYOUT, None, "has no KV scales"), (str(model / "x"), LAYOUT, None, "no such file of KV scales"),
        (str(default_file(model)), HALF, None, "only an fp8 KV cache has scales"), ("checkpoint", HALF, stored, "only an fp8 KV cache has scales"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=named):
            choose(choice, model, DIGEST, layout, own)
    assert Path("/x/model.gguf.kv_scales.safetensors") == default_file(Path("/x/model.gguf"))


def test_other_numbers_are_other_pages() -> None:
    """A namespace holds the fingerprint: it tells apart scales, and keys' from values'."""
    one, other, swapped = _scales(), _scales(0.26), KvScales(_scales().v, _scales().k, "calibrated")
    assert "1.0" == KvScales.ones(LAYOUT).fingerprint
    assert 4 == len({scales.fingerprint for scales in (one, other, swapped, KvScales.ones(LAYOUT))})


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-35])
def test_bad_numbers_are_refused(bad: float, tmp_path: Path) -> None:
    """With the tensor's name."""
    scales = _scales()
    scales.v[1, 1] = bad
    write(tmp_path / "scales", scales, DIGEST, {})
    with pytest.raises(ModelError, match="tensor 'v_scale' must hold positive finite numbers"):
        read(tmp_path / "scales", DIGEST, LAYOUT)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    """No scales, cut, or text."""
    path = tmp_path / "scales"
    save_file({"k_scale": torch.ones(3, 2)}, path)
    with pytest.raises(ModelError, match="is no file of KV scales"):
        read(path, DIGEST, LAYOUT)
    write(path, _scales(), DIGEST, {})
    for content in (path.read_bytes()[:-3], b"", b"hello" * 100):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"scales: (cannot be read|is no)"):
            read(path, DIGEST, LAYOUT)
