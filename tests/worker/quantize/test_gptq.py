"""GPTQ makes the products' error smaller than rounding to nearest does."""

import pytest
import torch

from worker.quantize.gptq import gptq
from worker.quantize.rounding import Precision, Quantized, encode, rounded_to_nearest, search_scales


def _inputs(columns: int, rank: int) -> torch.Tensor:
    """Correlated, some columns far stronger than others, as activations are."""
    random = torch.Generator().manual_seed(5)
    mixed = torch.randn(2000, rank, generator=random) @ torch.randn(rank, columns, generator=random)
    return (mixed + 0.1 * torch.randn(2000, columns, generator=random)) * torch.logspace(-1, 1, columns)[
        torch.randperm(columns, generator=random)
    ]


@pytest.mark.parametrize(
    "precision", [Precision(4, 32), Precision(4, 64, False), Precision(4, 128), Precision(8, 64)], ids=str
)
@pytest.mark.parametrize("columns", [128, 384])
def test_products_are_closer_than_with_rounding(precision: Precision, columns: int) -> None:
    """By a third at least, over inputs like those that it was calibrated with."""
    x = _inputs(columns, 40)
    weight = torch.randn(70, columns, generator=torch.Generator().manual_seed(6))

    def error(rows: Quantized) -> float:
        return float((x @ (rows.dequantize() - weight).t()).square().sum())

    before = weight.clone()
    found = gptq(weight, x.t() @ x, precision, torch.bfloat16)
    assert torch.equal(before, weight)
    assert error(found) < 0.67 * error(rounded_to_nearest(weight, precision, torch.bfloat16))
    assert int(found.codes.min()) >= precision.lowest
    assert int(found.codes.max()) <= precision.highest


def test_without_correlation_it_is_rounding_to_nearest() -> None:
    """Independent inputs of equal strength: nothing can be made up for."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    found = gptq(weight, torch.eye(64) * 100, Precision(4, 32), torch.bfloat16)
    scale, _ = search_scales(weight, Precision(4, 32), torch.bfloat16, importance=torch.ones(64))
    assert torch.equal(found.scale, scale)
    nearest = encode(weight.view(9, 2, 32), scale.unsqueeze(2), None, Precision(4, 32))
    assert torch.equal(found.codes, nearest.to(torch.int8).view(9, 64))


@pytest.mark.parametrize(
    "moments", [torch.zeros(64, 64), torch.ones(64, 64), torch.full((64, 64), 1e30)], ids=["none", "rank one", "huge"]
)
def test_degenerate_inputs(moments: torch.Tensor) -> None:
    """No input at all, or one direction only: the matrix is no worse than a step off."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    found = gptq(weight, moments, Precision(4, 32), torch.bfloat16)
    assert bool(torch.isfinite(found.dequantize()).all())
    assert float((found.dequantize() - weight).abs().max()) < 3.0


def test_an_input_that_never_comes_costs_nothing() -> None:
    """Weights of columns without input keep their nearest codes."""
    x = _inputs(64, 20)
    x[:, 10:20] = 0
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    precision = Precision(4, 32)
    found = gptq(weight, x.t() @ x, precision, torch.bfloat16)
    step = found.scale.float().repeat_interleave(32, 1)
    inside = weight.abs() < 7 * step
    off = ((found.dequantize() - weight).abs() > step * 0.51) & inside
    assert not bool(off[:, 10:20].any())
