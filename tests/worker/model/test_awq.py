"""AWQ's layout against its definition: bits 4i..4i+3 of a word hold column ORDER[i] of its eight, W = ((code - zero point) * scale).T."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels.weights import Int4Weight
from worker.model.errors import ModelError
from worker.model.tensors import packed

ReadWeight = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _config(group: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | fields


def _words(codes: np.ndarray) -> torch.Tensor:
    """Codes [X, Y] in words [X, Y / 8]."""
    words = np.zeros((len(codes), codes.shape[1] // 8), dtype=np.uint32)
    for i, column in enumerate(ORDER):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def _tensors(codes: np.ndarray, zero: np.ndarray, scale: torch.Tensor) -> Tensors:
    """From codes [N, K], zero points and scales [N, groups]."""
    return {"m.qweight": _words(codes.T), "m.qzeros": _words(zero.T), "m.scales": scale.T.contiguous()}


def _meant(codes: np.ndarray, zero: np.ndarray, scale: torch.Tensor) -> torch.Tensor:
    group = codes.shape[1] // scale.shape[1]
    points, scales = np.repeat(zero, group, axis=1), np.repeat(scale.double().numpy(), group, axis=1)
    return torch.from_numpy((codes.astype(np.int64) - points) * scales).float()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_nibble_zero_point_and_position(read_weight: ReadWeight, group: int) -> None:
    """16 nibbles at each place of a group and of a word, under each of 16 zero points."""
    zero = np.repeat(np.arange(16), 16)[:, None].repeat(2, axis=1)
    codes = (np.tile(np.arange(16), 16)[:, None] + np.arange(2 * group)) % 16
    scale = (torch.rand(256, 2) + 0.5).half()

    weight = packed(read_weight(_tensors(codes, zero, scale), _config(group), codes.shape), "")

    assert isinstance(weight, Int4Weight)
    assert torch.equal(_meant(codes, zero, scale), weight.dequantize())


@pytest.mark.parametrize(
    "fields", [{"w_bit": 4, "q_group_size": 64}, {"bits": 4, "group_size": 64}], ids=["older", "newer"]
)
def test_both_spellings(read_weight: ReadWeight, fields: dict[str, Any]) -> None:
    """AutoAWQ's own names of the sizes, and those of transformers; random codes, an odd number of panels."""
    random = np.random.default_rng(1)
    codes, zero = random.integers(0, 16, (40, 192)), random.integers(0, 16, (40, 3))
    scale = torch.rand(40, 3).half()
    config = {"quant_method": "awq", "zero_point": True, "version": "GEMM"} | fields

    assert torch.equal(
        _meant(codes, zero, scale),
        packed(read_weight(_tensors(codes, zero, scale), config, codes.shape), "").dequantize(),
    )


BAD: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "no scales": (r"m\.scales", lambda t: t.pop("m.scales")),
    "no zero points": (r"m\.qzeros", lambda t: t.pop("m.qzeros")),
    "another group size": (r"m\.scales", lambda t: t.update({"m.scales": torch.ones(1, 16).half()})),
    "zero points of another group size": (r"m\.qzeros", lambda t: t.update({"m.qzeros": torch.zeros(1, 2).int()})),
    "packed along the other side": (r"m\.qweight", lambda t: t.update({"m.qweight": torch.zeros(8, 16).int()})),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_refused_by_name(read_weight: ReadWeight, case: str) -> None:
    """Whatever does not fit is an error that names the tensor."""
    word, spoil = BAD[case]
    tensors = _tensors(np.zeros((16, 64), dtype=int), np.zeros((16, 2), dtype=int), torch.ones(16, 2).half())
    spoil(tensors)

    with pytest.raises(ModelError, match=word):
        read_weight(tensors, _config(32), (16, 64))


@pytest.mark.parametrize(
    "fields", [{"version": "gemv"}, {"bits": 8}, {"bits": None, "w_bit": 3}, {"zero_point": "no"}], ids=str
)
def test_bad_configs_are_refused(read_weight: ReadWeight, fields: dict[str, Any]) -> None:
    """A quantization_config that can't be followed is one line that names config.json."""
    tensors = _tensors(np.zeros((16, 64), dtype=int), np.zeros((16, 2), dtype=int), torch.ones(16, 2).half())
    with pytest.raises(ModelError, match=r"^config\.json: [^\n]{5,300}$"):
        read_weight(tensors, _config(32) | fields, (16, 64))
