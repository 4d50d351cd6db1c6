"""Folders that no trainer would write: told in one line before anything is written, or carried over as they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.quantize.errors import QuantizeError
from worker.quantize.job import Options, prepare

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
Q, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
GPTQ = Options(method="gptq", calibration_tokens=512)


def _changed(make_folder: Make, change: Callable[[Tensors], object]) -> Path:
    source = make_folder(max_shard_size="1GB")
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    return source


def _put(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


REFUSED: dict[str, tuple[Callable[[Tensors], object], Options, str]] = {
    "no tensors": (dict.clear, Options(), "holds no tensors"),
    "a name that the result needs": (_put(Q + "_packed", 3, 3), Options(), "q_proj.weight_packed' would be in the result twice"),
    "a missing matrix": (lambda tensors: tensors.pop(Q), GPTQ, f"tensor '{Q}' is missing"),
    "a missing norm": (lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"), GPTQ, "input_layernorm.weight' is missing"),
    "no embedding": (lambda tensors: tensors.pop(EMBEDDING), GPTQ, f"tensor '{EMBEDDING}' is missing"),
    "a short embedding": (_put(EMBEDDING, 100, 128), GPTQ, r"has shape \[100, 128\], expected \[384, 128\]"),
    "odd rows": (_put(Q, 127, 128), GPTQ, r"has shape \[127, 128\], expected \[128, 128\]"),
    "too many dimensions": (_put(Q, 128, 128, 1), GPTQ, r"has shape \[128, 128, 1\]"),
    "a wide bias": (_put(Q.replace("weight", "bias"), 64), GPTQ, r"q_proj.bias' has shape \[64\], expected \[128\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_model_is_refused(case: str, make_folder: Make, tmp_path: Path) -> None:
    """The tensor is named, and there's no folder."""
    change, options, named = REFUSED[case]
    source = _changed(make_folder, change)
    with pytest.raises(QuantizeError, match=named):
        prepare(source, options).run(tmp_path / "result", lambda more: None)
    assert not (tmp_path / "result").exists()


def test_empty_matrices_stay_as_they_are(make_folder: Make, tmp_path: Path) -> None:
    """Without rows or without columns there's nothing to round."""
    empty = {"model.a.weight": (0, 64), "model.b.weight": (64, 0), "model.c.weight": (0,)}
    source = _changed(make_folder, lambda tensors: [_put(name, *shape)(tensors) for name, shape in empty.items()])
    prepare(source, Options(is_symmetric=False)).run(tmp_path / "result", lambda more: None)
    written = load_file(tmp_path / "result" / "model.safetensors")
    assert empty == {name: tuple(written[name].shape) for name in empty}


def test_a_file_from_elsewhere_is_refused_before_the_work(make_folder: Make, tmp_path: Path) -> None:
    """A licence that is a link out of the folder is told at once, not when hours of rounding are over."""
    source = make_folder()
    (tmp_path / "secret").write_text("x")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(QuantizeError, match="'LICENSE' lies outside the model folder"):
        prepare(source, Options())
