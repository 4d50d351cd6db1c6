"""Scales and codes of groups."""

import itertools

import numpy as np
import pytest
import torch

from worker.quantize.rounding import Precision, encode, rounded_to_nearest, search_scales

PRECISIONS = [
    Precision(bits, group, symmetric)
    for bits, group, symmetric in itertools.product((4, 8), (32, 64, 128), (True, False))
]


def _weight(rows: int = 24, columns: int = 256, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=random) * torch.rand(rows, 1, generator=random).add(0.1)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_codes_are_the_nearest_ones_there_are(precision: Precision, dtype: torch.dtype) -> None:
    """No other code of the same group would come closer: by brute force, in float64."""
    weight = _weight(rows=5)
    found = rounded_to_nearest(weight, precision, dtype)
    assert found.scale.dtype is dtype

    grid = np.arange(precision.lowest, precision.highest + 1, dtype=np.float64)
    scale = found.scale.double().numpy().repeat(precision.group_size, axis=1)[..., None]
    zero = (
        np.zeros_like(scale)
        if found.zero is None
        else found.zero.double().numpy().repeat(precision.group_size, axis=1)[..., None]
    )
    errors = np.abs((grid - zero) * scale - weight.double().numpy()[..., None])
    made = np.abs(found.dequantize().double().numpy() - weight.double().numpy())
    assert np.allclose(made, errors.min(axis=-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_searching_beats_the_plain_scale(precision: Precision) -> None:
    """No group is worse off than with the scale of its extremes, and many are better off."""
    weight = _weight()
    groups = weight.view(len(weight), -1, precision.group_size)
    if precision.is_symmetric:
        scale = (groups.abs().amax(2) / precision.highest).bfloat16()
        zero = None
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / (precision.highest - precision.lowest)).bfloat16()
        zero = (precision.lowest - low / scale.float()).round().clamp(precision.lowest, precision.highest)
    codes = encode(groups, scale.unsqueeze(2), None if zero is None else zero.unsqueeze(2), precision)
    back = (codes - (0 if zero is None else zero.unsqueeze(2))) * scale.float().unsqueeze(2)
    found = rounded_to_nearest(weight, precision, torch.bfloat16).dequantize().view_as(groups)
    # Errors count by the size of their weights.
    plain, searched = (((made - groups).square() * groups.abs()).sum(2) for made in (back, found))

    assert bool((searched <= plain * (1 + 1e-4)).all())
    if precision.bits == 4:
        assert float(searched.sum()) < 0.97 * float(plain.sum())


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_odd_groups(precision: Precision) -> None:
    """Zeros stay zero; a constant, tiny numbers, one outlier and numbers of one sign come back within half a step."""
    rows = torch.zeros(7, 256)
    rows[1] = 0.7
    rows[2] = -1e-30
    rows[3, 5] = 1e30
    rows[4] = torch.linspace(0.1, 1.0, 256)
    rows[5] = -torch.linspace(0.1, 1.0, 256)
    rows[6, ::2] = 3e-5
    found = rounded_to_nearest(rows, precision, torch.bfloat16)
    back = found.dequantize()

    assert bool(torch.isfinite(back).all())
    assert bool((found.scale > 0).all())
    assert not back[0].any()
    assert bool((found.scale[0] == 1).all())
    step = found.scale.float().repeat_interleave(precision.group_size, 1)
    # The largest may be clipped where that helps the others.
    assert bool(((back - rows).abs() <= step * 2.2).all())


@pytest.mark.parametrize("largest", [2.0**-22, 3e-6, 2e-5, 4e-4])
@pytest.mark.parametrize("precision", [Precision(4, 32), Precision(4, 32, False)], ids=str)
def test_small_float16_weights_are_not_lost(precision: Precision, largest: float) -> None:
    """Groups whose scale is below float16's normal numbers, down to its smallest weights, come back within a step of at most twice the best one."""
    weight = (torch.linspace(-1, 1, 64) * largest).repeat(3, 1).half().float()
    found = rounded_to_nearest(weight, precision, torch.float16)
    step = max(largest / 7, 2.0**-24)

    assert bool((found.scale.float() < 2.0**-14).all())
    assert float((found.dequantize() - weight).abs().max()) <= step


def test_importance_moves_the_error() -> None:
    """Columns that count more come out better, at the others' cost."""
    weight = _weight(rows=64, columns=64)
    importance = torch.ones(64)
    importance[::4] = 1000.0
    precision = Precision(4, 32)

    def error(scale: torch.Tensor) -> torch.Tensor:
        groups = weight.view(64, 2, 32)
        codes = encode(groups, scale.unsqueeze(2), None, precision)
        return (codes * scale.float().unsqueeze(2) - groups).square().view(64, 64).sum(0)

    plain, weighed = (error(search_scales(weight, precision, torch.bfloat16, imp)[0]) for imp in (None, importance))
    assert float(weighed[::4].sum()) < 0.95 * float(plain[::4].sum())
    assert float(weighed.sum()) > float(plain.sum())
