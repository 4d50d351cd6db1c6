"""8-bit floats: every code decodes exactly, whatever block, group, row or matrix its scale is for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels.backend import Backend
from kernels.matmul import matmul
from kernels.weights import Fp8Weight
from worker.model.errors import ModelError
from worker.model.tensors import packed

ReadWeight = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NAN = {0x7F, 0xFF}


def _decoded(codes: np.ndarray) -> np.ndarray:
    """Sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; float64."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10))
    return np.where(codes & 0x80, -magnitude, magnitude)


def _floats(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)


def _all_codes(num_columns: int) -> np.ndarray:
    """Each code but NaN at each place of a group of 128 columns, with odd numbers of rows and columns."""
    codes = np.array([code for code in range(256) if code not in NAN])
    return codes[(np.arange(254)[:, None] + np.arange(num_columns)) % 254]


def _scheme(strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | fields
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    }
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [128, 300, 384])
def test_every_code_and_position(read_weight: ReadWeight, num_columns: int, dtype: torch.dtype) -> None:
    """254 codes at each place, under scales of 128 x 128 that don't divide the matrix: 8 bits in memory, exact values."""
    codes = _all_codes(num_columns)
    scale = (2.0 ** torch.randint(-9, 3, (2, -(-num_columns // 128))).float()).to(dtype)
    wide = np.repeat(np.repeat(scale.double().numpy(), 128, axis=0)[:254], 128, axis=1)[:, :num_columns]
    tensors = {"m.weight": _floats(codes), "m.weight_scale_inv": scale}

    weight = packed(read_weight(tensors, BLOCKS, codes.shape), "")

    assert isinstance(weight, Fp8Weight)
    assert torch.equal(torch.from_numpy(_decoded(codes) * wide).float(), weight.dequantize())
    assert weight.nbytes <= 1.04 * 256 * -(-num_columns // 128) * 128


SCALES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "matrix": (_scheme("tensor"), (1,)),
    "matrix, no dimension": (_scheme("tensor"), ()),
    "matrix of fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, ()),
    "row": (_scheme("channel"), (254, 1)),
    "group": (_scheme("group", group_size=128), (254, 3)),
    "block": (_scheme("block", block_structure=[128, 128]), (2, 3)),
}


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("num_rows", [1, 6])
def test_scales_of_every_kind(read_weight: ReadWeight, backend: Backend, case: str, num_rows: int) -> None:
    """One scale for all, for a row, a group or a block: weights, and products against float64."""
    config, shape = SCALES[case]
    codes = _all_codes(384)
    scale = torch.rand(shape) + 0.5
    wide = (
        torch.kron(scale, torch.ones(128, 128))[:254] if "block" in case else scale.view(-1, shape[-1] if shape else 1)
    )
    wide = wide if "block" in case else wide.repeat_interleave(384 // wide.shape[1], dim=1)
    meant = torch.from_numpy(_decoded(codes)) * wide.double()
    tensors = {"m.weight": _floats(codes), "m.weight_scale": scale, "m.input_scale": torch.ones(1)}

    weight = packed(read_weight(tensors, config, codes.shape), "")

    assert torch.equal(meant.float(), weight.dequantize())
    x = torch.randn(num_rows, 384)
    exact = x.double() @ meant.T
    assert float((matmul(x, weight, backend=backend).double() - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_agrees_with_the_library(read_weight: ReadWeight, compressed_tensors: Any, strategy: str) -> None:
    """What compressed-tensors compresses is read as it decompresses it."""
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    shape = {"channel": (200, 1), "tensor": (1,), "block": (2, 2)}[strategy]
    args = compressed_tensors.quantization.QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy=strategy, **blocks
    )
    scheme = compressed_tensors.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    scale = torch.rand(shape) / 100 + 0.01
    stored = compressed_tensors.compressors.FloatQuantizationCompressor.compress(
        {"weight": torch.randn(200, 256), "weight_scale": scale}, scheme
    )
    rows, columns = (128, 128) if strategy == "block" else (200 // shape[0], 256)
    wide = torch.kron(scale.view(-1, shape[-1]), torch.ones(rows, columns))[:200, :256]

    weight = packed(
        read_weight({f"m.{name}": value for name, value in stored.items()}, _scheme(strategy, **blocks), (200, 256)), ""
    )

    assert torch.equal(stored["weight"].float() * wide, weight.dequantize())


BAD: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "no scale": (r"m\.weight_scale_inv' is missing", lambda t: t.pop("m.weight_scale_inv")),
    "two scales": (r"m\.weight_scale", lambda t: t.update({"m.weight_scale": torch.ones(2, 3)})),
    "a block less": (r"m\.weight_scale_inv", lambda t: t.update({"m.weight_scale_inv": torch.ones(2, 2)})),
    "scales are integers": (r"m\.weight_scale_inv", lambda t: t.update({"m.weight_scale_inv": torch.ones(2, 3).int()})),
    "a row less": (r"m\.weight'", lambda t: t.update({"m.weight": t["m.weight"][:253].clone()})),
    "e5m2": (r"m\.weight'", lambda t: t.update({"m.weight": t["m.weight"].view(torch.float8_e5m2)})),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_refused_by_name(read_weight: ReadWeight, case: str) -> None:
    """Whatever does not fit is an error that names the tensor."""
    word, spoil = BAD[case]
    tensors = {"m.weight": _floats(_all_codes(300)), "m.weight_scale_inv": torch.ones(2, 3)}
    spoil(tensors)

    with pytest.raises(ModelError, match=word):
        read_weight(tensors, BLOCKS, (254, 300))


@pytest.mark.parametrize(
    "config",
    [None, BLOCKS | {"fmt": "e5m2"}, BLOCKS | {"weight_block_size": [128]}, BLOCKS | {"weight_block_size": [0, 128]}],
    ids=str,
)
def test_bad_configs_are_refused(read_weight: ReadWeight, config: Any) -> None:
    """8-bit floats that config.json doesn't explain, or explains in another way than we know."""
    with pytest.raises(ModelError, match=r"config\.json"):
        read_weight({"m.weight": _floats(_all_codes(128)), "m.weight_scale_inv": torch.ones(2, 1)}, config, (254, 128))
