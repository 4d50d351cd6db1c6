"""Weights of compressed-tensors mean what the format's definition and the library itself say that they mean, bit for bit."""

from collections.abc import Callable
from pathlib import Path
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
ALL_NIBBLES = np.arange(16)


def _config(bits: int = 4, group_size: int | None = 32, *, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
    } | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def _words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Codes [N, K] in 32-bit words [N, K * bits / 32], the first column lowest: the format's definition."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint64)
    shifted = padded.reshape(len(codes), -1, per_word) << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))
    return torch.from_numpy(shifted.sum(axis=2).astype(np.uint32).view(np.int32))


def _tensors(codes: np.ndarray, zero: np.ndarray | None, scale: torch.Tensor, bits: int) -> Tensors:
    tensors = {
        "m.weight_packed": _words(codes, bits),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor(codes.shape),
    }
    if zero is not None:
        tensors["m.weight_zero_point"] = _words(zero.T, bits).T.contiguous()
    return tensors


def _meant(codes: np.ndarray, zero: np.ndarray | int, scale: torch.Tensor) -> torch.Tensor:
    """(code - zero point) * scale for each group, exact."""
    group = codes.shape[1] // scale.shape[1]
    points = zero if isinstance(zero, int) else np.repeat(zero, group, axis=1).astype(np.int64)
    return torch.from_numpy(
        (codes.astype(np.int64) - points) * np.repeat(scale.double().numpy(), group, axis=1)
    ).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_nibble_zero_point_and_position(read_weight: ReadWeight, group: int, dtype: torch.dtype) -> None:
    """16 nibbles at each place of a group, under each of 16 zero points: 4 bits in memory, and the exact values."""
    zero = np.repeat(ALL_NIBBLES, 16)[:, None].repeat(2, axis=1)
    codes = (np.tile(ALL_NIBBLES, 16)[:, None] + np.arange(2 * group)) % 16
    scale = (torch.rand(256, 2) + 0.5).to(torch.float16 if dtype is torch.float32 else dtype).to(dtype)

    weight = packed(
        read_weight(_tensors(codes, zero, scale, 4), _config(group_size=group, symmetric=False), codes.shape), ""
    )

    assert isinstance(weight, Int4Weight)
    assert torch.equal(_meant(codes, zero, scale), weight.dequantize())


@pytest.mark.parametrize("group", [32, 128])
def test_every_nibble_symmetric(read_weight: ReadWeight, group: int) -> None:
    """Symmetric codes mean -8..7, with the 16-bit scales of the checkpoint in memory."""
    codes = (ALL_NIBBLES[:, None] + np.arange(3 * group)) % 16
    scale = torch.rand(16, 3).bfloat16()

    weight = packed(read_weight(_tensors(codes, None, scale, 4), _config(group_size=group), codes.shape), "")

    assert torch.equal(_meant(codes, 8, scale), weight.dequantize())
    assert weight.scale_dtype is torch.float16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_every_byte_and_zero_point(read_weight: ReadWeight, group: int, symmetric: bool) -> None:
    """8 bits: each code at each place of a group, under the zero points 0, 1, 8, 15, 127, 128, 255."""
    points = np.array([0, 1, 8, 15, 127, 128, 255])
    zero = np.repeat(points, 256)[:, None].repeat(2, axis=1)
    codes = (np.tile(np.arange(256), 7)[:, None] + np.arange(2 * group)) % 256
    scale = 2.0 ** torch.randint(-8, 3, (len(codes), 2)).float()
    tensors = _tensors(codes, None if symmetric else zero, scale, 8)

    weight = packed(read_weight(tensors, _config(8, group, symmetric=symmetric), codes.shape), "")

    assert isinstance(weight, Int8Weight)
    assert torch.equal(_meant(codes, 128 if symmetric else zero, scale), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "group"), [("group", 64), ("group", 256), ("channel", None)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_agrees_with_the_library(
    read_weight: ReadWeight, compressed_tensors: Any, bits: int, strategy: str, group: int | None, symmetric: bool
) -> None:
    """What the library compresses is read as the library decompresses it: odd numbers of rows, groups larger than ours, whole rows."""
    matrix = torch.randn(37, 512)
    low, high = matrix.unflatten(1, (-1, group or 512)).aminmax(dim=2)
    span = torch.maximum(low.abs(), high.abs()) * 2 if symmetric else high - low
    scale = (span / (2**bits - 1)).half().float()
    zero = (
        None
        if symmetric
        else (-(2 ** (bits - 1)) - low / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    )
    args = compressed_tensors.quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group
    )
    scheme = compressed_tensors.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": matrix, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
    stored = compressed_tensors.compressors.PackedQuantizationCompressor.compress(state, scheme)
    expected = compressed_tensors.compressors.PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    config = _config(bits, group, symmetric=symmetric, strategy=strategy)

    weight = packed(read_weight({f"m.{name}": value for name, value in stored.items()}, config, (37, 512)), "")

    assert torch.equal(expected, weight.dequantize())
    x = torch.randn(5, 512)
    exact = x.double() @ expected.double().T
    error = (matmul(x, weight, backend=Backend.REF).double() - exact).norm() / exact.norm()
    assert float(error) < 1e-6


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_8_bit_integers_agree_with_the_library(
    read_weight: ReadWeight, compressed_tensors: Any, strategy: str, symmetric: bool
) -> None:
    """int-quantized: one scale a row or one for all; what the checkpoint says of activations changes no weight."""
    matrix = torch.randn(33, 96)
    shape = (33, 1) if strategy == "channel" else (1,)
    scale = (torch.rand(shape) + 1).half().float() / 64
    zero = torch.randint(-20, 20, shape, dtype=torch.int8)
    args = compressed_tensors.quantization.QuantizationArgs(
        num_bits=8, type="int", symmetric=symmetric, strategy=strategy
    )
    scheme = compressed_tensors.quantization.QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=compressed_tensors.quantization.QuantizationArgs(num_bits=8)
    )
    state = {"weight": matrix, "weight_scale": scale} | ({} if symmetric else {"weight_zero_point": zero})
    stored = compressed_tensors.compressors.IntQuantizationCompressor.compress(state, scheme)
    expected = compressed_tensors.compressors.IntQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    tensors = {f"m.{name}": value for name, value in stored.items()} | {"m.input_scale": torch.ones(1)}

    weight = packed(read_weight(tensors, _config(8, None, symmetric=symmetric, strategy=strategy), (33, 96)), "")

    assert torch.equal(expected, weight.dequantize())


def test_scale_that_float16_cannot_hold_stays_exact(read_weight: ReadWeight) -> None:
    """A bfloat16 scale of 1e-30 is not rounded to nothing."""
    codes = np.full((16, 32), 9)
    scale = torch.full((16, 1), 1e-30).bfloat16()

    weight = packed(read_weight(_tensors(codes, None, scale, 4), _config(), codes.shape), "")

    assert torch.equal(_meant(codes, 8, scale), weight.dequantize())


def test_groups_in_another_order(read_weight: ReadWeight) -> None:
    """weight_g_idx may put whole groups in any order; one that was never set means nothing."""
    codes = np.tile(ALL_NIBBLES, (16, 6))
    scale = torch.rand(16, 3).half()
    order = torch.tensor([2, 0, 1])
    config = _config(actorder="group")
    named = _tensors(codes, None, scale, 4) | {"m.weight_g_idx": order.repeat_interleave(32).int()}
    unset = _tensors(codes, None, scale, 4) | {"m.weight_g_idx": torch.full((96,), -1, dtype=torch.int32)}

    assert torch.equal(
        _meant(codes, 8, scale[:, order]), packed(read_weight(named, config, codes.shape), "").dequantize()
    )
    assert torch.equal(_meant(codes, 8, scale), packed(read_weight(unset, config, codes.shape), "").dequantize())


def test_scheme_by_name_then_pattern_then_class(read_weight: ReadWeight) -> None:
    """Of several groups the one applies that names the module most narrowly."""
    codes = np.tile(ALL_NIBBLES, (16, 8))
    config = _config(8, 128)
    groups = config["config_groups"]
    groups["group_1"] = {"targets": ["re:.*other"], "weights": groups["group_0"]["weights"] | {"num_bits": 4}}
    groups["group_2"] = {"targets": ["m"], "weights": groups["group_0"]["weights"] | {"num_bits": 4, "group_size": 64}}
    scale = torch.rand(16, 2).half()

    weight = packed(read_weight(_tensors(codes, None, scale, 4), config, codes.shape), "")

    assert torch.equal(_meant(codes, 8, scale), weight.dequantize())


def _valid() -> Tensors:
    return _tensors(np.zeros((16, 64), dtype=int), np.zeros((16, 2), dtype=int), torch.ones(16, 2).half(), 4)


BAD: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "scale is missing": ("weight_scale", lambda t: t.pop("m.weight_scale")),
    "zero points are missing": ("weight_zero_point", lambda t: t.pop("m.weight_zero_point")),
    "a row less": ("weight_packed", lambda t: t.update({"m.weight_packed": t["m.weight_packed"][:15].clone()})),
    "words of 64 bits": ("weight_packed", lambda t: t.update({"m.weight_packed": t["m.weight_packed"].long()})),
    "another group size": ("weight_scale", lambda t: t.update({"m.weight_scale": torch.ones(16, 4).half()})),
    "scales are integers": ("weight_scale", lambda t: t.update({"m.weight_scale": torch.ones(16, 2).int()})),
    "zero points of another group size": (
        "weight_zero_point",
        lambda t: t.update({"m.weight_zero_point": torch.zeros(2, 4, dtype=torch.int32)}),
    ),
    "another shape": ("weight_shape", lambda t: t.update({"m.weight_shape": torch.tensor([64, 16])})),
    "a group too many": ("weight_g_idx", lambda t: t.update({"m.weight_g_idx": torch.arange(64).int() // 21})),
    "a group below 0": ("weight_g_idx", lambda t: t.update({"m.weight_g_idx": torch.arange(64).int() // 32 - 1})),
    "uneven groups": ("weight_g_idx", lambda t: t.update({"m.weight_g_idx": (torch.arange(64) > 30).int()})),
    "too few columns in g_idx": ("weight_g_idx", lambda t: t.update({"m.weight_g_idx": torch.zeros(63).int()})),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_refused_by_name(read_weight: ReadWeight, case: str) -> None:
    """Whatever does not fit is an error that names the tensor."""
    word, spoil = BAD[case]
    tensors = _valid()
    spoil(tensors)

    with pytest.raises(ModelError, match=word):
        read_weight(tensors, _config(symmetric=False), (16, 64))


def test_symmetric_checkpoint_with_zero_points(read_weight: ReadWeight) -> None:
    """Zero points that config.json denies are refused unless they are zeros."""
    tensors = _tensors(np.zeros((16, 32), dtype=int), None, torch.ones(16, 1).half(), 4)
    zeros = tensors | {"m.weight_zero_point": torch.zeros(16, 1, dtype=torch.int8)}
    ones = tensors | {"m.weight_zero_point": torch.ones(16, 1, dtype=torch.int8)}

    assert float(packed(read_weight(zeros, _config(), (16, 32)), "").dequantize()[0, 0]) == -8
    with pytest.raises(ModelError, match=r"m\.weight_zero_point"):
        read_weight(ones, _config(), (16, 32))


def test_quantized_and_plain_at_once(read_weight: ReadWeight, tmp_path: Path) -> None:
    """A module that has both kinds of weight is refused."""
    with pytest.raises(ModelError, match=r"'m\.weight' is there twice"):
        read_weight(_valid() | {"m.weight": torch.zeros(16, 64)}, _config(symmetric=False), (16, 64))


CONFIGS: dict[str, Any] = {
    "no method": {"quant_method": None},
    "unknown method": {"quant_method": "bitsandbytes"},
    "not an object": 7,
    "3 bits": _config(3),
    "16 bits of floats": _config(16, type="float"),
    "no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "groups without a size": _config(4, None),
    "size 0": _config(4, 0),
    "a huge size": _config(4, 1 << 40),
    "size is text": _config(4, "32"),
    "unknown strategy": _config(4, 32, strategy="token"),
    "unknown format": _config() | {"format": "marlin-24"},
    "bad pattern": _config() | {"config_groups": {"g": _config()["config_groups"]["group_0"] | {"targets": ["re:("]}}},
    "long pattern": _config()
    | {"config_groups": {"g": _config()["config_groups"]["group_0"] | {"targets": ["re:" + "a" * 999]}}},
    "targets are text": _config()
    | {"config_groups": {"g": _config()["config_groups"]["group_0"] | {"targets": "Linear"}}},
    "symmetric is text": _config(4, 32, symmetric="yes"),
    "turned activations": _config() | {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}}},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configs_are_refused(read_weight: ReadWeight, case: str) -> None:
    """A quantization_config that can't be followed is one line that names config.json."""
    with pytest.raises(ModelError, match=r"^config\.json: [^\n]{5,300}$"):
        read_weight(_valid(), CONFIGS[case], (16, 64))
