"""GPTQ's layout, both of its formats and act-order, against the definition: W[n, k] = (code - zero point) * scale of the column's group."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels.backend import Backend
from kernels.matmul import matmul
from kernels.weights import Int4Weight, Int8Weight
from worker.model.errors import ModelError
from worker.model.tensors import packed

ReadWeight = Callable[..., Any]
Tensors = dict[str, torch.Tensor]


def _config(bits: int, group: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False} | fields


def _words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes [X, Y] in words [X * bits / 32, Y]: the first of a column's in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, -len(codes) % per_word), (0, 0))).astype(np.uint64)
    shifts = np.arange(per_word, dtype=np.uint64)[None, :, None] * np.uint64(bits)
    words = (padded.reshape(-1, per_word, codes.shape[1]) << shifts).sum(axis=1).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def _tensors(
    codes: np.ndarray, zero: np.ndarray, scale: torch.Tensor, groups: np.ndarray, bits: int, offset: int
) -> Tensors:
    """As a checkpoint has them, from codes [N, K], zero points and scales [N, groups], the group of each column."""
    return {
        "m.qweight": _words(codes.T, bits),
        "m.qzeros": _words(zero - offset, bits).T.contiguous(),
        "m.scales": scale.T.contiguous(),
        "m.g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def _meant(codes: np.ndarray, zero: np.ndarray, scale: torch.Tensor, groups: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((codes.astype(np.int64) - zero[:, groups]) * scale.double().numpy()[:, groups]).float()


def _every(bits: int, group: int, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Each code at each place of two groups, under each of some zero points."""
    count = 1 << bits
    zero = np.repeat(points, count)[:, None].repeat(2, axis=1)
    codes = (np.tile(np.arange(count), len(points))[:, None] + np.arange(2 * group)) % count
    return codes, zero, (torch.rand(len(codes), 2) + 0.5).half()


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_nibble_zero_point_and_position(read_weight: ReadWeight, group: int, form: str) -> None:
    """Every zero point that the format can store: 1..15 in the first, 0..15 in the second."""
    offset = 1 if form == "gptq" else 0
    codes, zero, scale = _every(4, group, np.arange(offset, 16))
    groups = np.arange(2 * group) // group
    tensors = _tensors(codes, zero, scale, groups, 4, offset)

    weight = packed(read_weight(tensors, _config(4, group, checkpoint_format=form), codes.shape), "")

    assert isinstance(weight, Int4Weight)
    assert weight.order is None
    assert torch.equal(_meant(codes, zero, scale, groups), weight.dequantize())


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_every_byte(read_weight: ReadWeight, form: str) -> None:
    """8 bits: every code at every place under zero points from end to end."""
    offset = 1 if form == "gptq" else 0
    codes, zero, scale = _every(8, 32, np.array([offset, 1, 8, 15, 127, 128, 254, 255]))
    groups = np.arange(64) // 32
    tensors = _tensors(codes, zero, scale.half(), groups, 8, offset)

    weight = packed(read_weight(tensors, _config(8, 32, checkpoint_format=form), codes.shape), "")

    assert isinstance(weight, Int8Weight)
    assert torch.equal(_meant(codes, zero, scale, groups), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(read_weight: ReadWeight, bits: int, backend: Backend) -> None:
    """Columns scattered over the groups: exact weights, and products with the input as it comes."""
    random = np.random.default_rng(4)
    codes = random.integers(0, 1 << bits, (48, 192))
    zero = random.integers(1, 1 << bits, (48, 3))
    scale = torch.from_numpy(2.0 ** random.integers(-9, -5, (48, 3))).half()
    groups = random.permutation(np.arange(192) // 64)
    tensors = _tensors(codes, zero, scale, groups, bits, 1)
    expected = _meant(codes, zero, scale, groups)

    weight = packed(read_weight(tensors, _config(bits, 64, desc_act=True), codes.shape), "")

    assert weight.order is not None
    assert torch.equal(expected, weight.dequantize())
    ids = torch.tensor([47, 0, 16])
    assert torch.equal(expected[ids], weight.gather_rows(ids))
    x = torch.randn(9, 192)
    exact = x.double() @ expected.double().T
    error = (matmul(x, weight, backend=backend).double() - exact).norm() / exact.norm()
    assert float(error) < 1e-4


@pytest.mark.parametrize("stored", [7, 8])
def test_symmetric_means_8(read_weight: ReadWeight, stored: int) -> None:
    """A symmetric checkpoint of the first format means 8, also where its writer stored 8 rather than 7."""
    codes, zero, scale = np.tile(np.arange(16), (16, 2)), np.full((16, 1), stored), torch.rand(16, 1).half()
    groups = np.zeros(32, dtype=int)

    weight = packed(read_weight(_tensors(codes, zero, scale, groups, 4, 0), _config(4, 32, sym=True), codes.shape), "")

    assert torch.equal(_meant(codes, np.full((16, 1), 8), scale, groups), weight.dequantize())


def test_whole_row_and_overrides(read_weight: ReadWeight) -> None:
    """Group size -1 is the whole row; GPTQModel's `dynamic` gives single modules other bits."""
    codes, zero, scale = np.tile(np.arange(16), (24, 6)), np.full((24, 1), 3), torch.rand(24, 1).half()
    groups = np.zeros(96, dtype=int)
    tensors = _tensors(codes, zero, scale, groups, 4, 1)
    del tensors["m.g_idx"]
    config = _config(8, 128, dynamic={"-:lm_head": {}, "+:.*other": {"bits": 8}, "m$": {"bits": 4, "group_size": -1}})

    weight = packed(read_weight(tensors, config, codes.shape), "")

    assert torch.equal(_meant(codes, zero, scale, groups), weight.dequantize())


def _valid() -> Tensors:
    codes, zero, scale = np.zeros((16, 64), dtype=int), np.ones((16, 2), dtype=int), torch.ones(16, 2).half()
    return _tensors(codes, zero, scale, np.arange(64) // 32, 4, 1)


BAD: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "no scales": (r"m\.scales", lambda t: t.pop("m.scales")),
    "no zero points": (r"m\.qzeros", lambda t: t.pop("m.qzeros")),
    "a zero point of 16": (r"m\.qzeros.*out of range", lambda t: t["m.qzeros"].fill_(-1)),
    "another group size": (r"m\.scales", lambda t: t.update({"m.scales": torch.ones(1, 16).half()})),
    "words of 16 bits": (r"m\.qweight", lambda t: t.update({"m.qweight": t["m.qweight"].short()})),
    "transposed": (r"m\.qweight", lambda t: t.update({"m.qweight": t["m.qweight"].T.contiguous()})),
    "group 2 of 2": (r"m\.g_idx", lambda t: t["m.g_idx"].add_(1)),
    "group -1": (r"m\.g_idx", lambda t: t["m.g_idx"].sub_(1)),
    "uneven groups": (r"m\.g_idx.*has 31 columns", lambda t: t["m.g_idx"][0:1].fill_(1)),
    "g_idx too long": (r"m\.g_idx", lambda t: t.update({"m.g_idx": torch.zeros(65).int()})),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_refused_by_name(read_weight: ReadWeight, case: str) -> None:
    """Whatever does not fit is an error that names the tensor."""
    word, spoil = BAD[case]
    tensors = _valid()
    spoil(tensors)

    with pytest.raises(ModelError, match=word):
        read_weight(tensors, _config(4, 32), (16, 64))


def test_uneven_zero_points_of_a_symmetric_checkpoint(read_weight: ReadWeight) -> None:
    """One that differs is no symmetric one."""
    tensors = _valid()
    tensors["m.qzeros"].fill_(0x77777777)
    tensors["m.qzeros"][0, 0] = 0x77777778

    with pytest.raises(ModelError, match=r"m\.qzeros.*symmetric"):
        read_weight(tensors, _config(4, 32, sym=True), (16, 64))


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 3},
        {"bits": "4"},
        {"bits": None},
        {"checkpoint_format": "marlin"},
        {"group_size": 1 << 30},
        {"dynamic": {"(": {}}},
        {"sym": 1},
    ],
    ids=str,
)
def test_bad_configs_are_refused(read_weight: ReadWeight, fields: dict[str, Any]) -> None:
    """A quantization_config that can't be followed is one line that names config.json."""
    with pytest.raises(ModelError, match=r"^config\.json: [^\n]{5,300}$"):
        read_weight(_valid(), _config(4, 32) | fields, (16, 64))


def test_not_explained(read_weight: ReadWeight) -> None:
    """Packed tensors without a quantization_config are refused by name."""
    with pytest.raises(ModelError, match=r"'m\.weight'.*config\.json does not explain"):
        read_weight(_valid(), None, (16, 64))
