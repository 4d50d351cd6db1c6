"""Products with 4- and 8-bit weights, against float64 and, for every code at every place, exactly."""

import numpy as np
import pytest
import torch

from kernels.backend import Backend
from kernels.int4_matmul import int4_matmul
from kernels.int4_matmul.ref import MAX_CODE, matmul_rounded_activations, quantize_activations
from kernels.int8_matmul import int8_matmul
from kernels.weights import Int4Weight, Int8Weight

ROWS = [1, 2, 3, 7, 8, 17, 63, 100]
ZERO_POINTS = [0, 1, 8, 15]


def activations(m: int, k: int) -> torch.Tensor:
    """Rows with outlying channels a hundred times larger than their neighbours, as hidden states have them."""
    x = torch.randn(m, k)
    x[:, ::29] *= 100
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (33, 96, 32), (100, 64, 64), (48, 320, 64), (23, 384, 128)])
@pytest.mark.parametrize("m", [1, 5, 17])
def test_int4_shapes(backend, check_close, make_int4, poisoned, m, n, k, group, dtype):
    """Any number of rows, outputs that fill no whole panel, odd numbers of groups: the product is right and all of it written."""
    x, w = activations(m, k), make_int4(n, k, group, dtype)
    y = int4_matmul(x, w, poisoned(m, n), backend=backend)
    check_close("matmul_rounding", y, x.double() @ w.dequantize().double().T)
    if backend is Backend.CPU:
        check_close("matmul", y, matmul_rounded_activations(x, w))


@pytest.mark.parametrize("has_minimum", [False, True], ids=["scale", "scale-and-minimum"])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (33, 48, 16), (33, 96, 32), (100, 64, 64), (23, 384, 128)])
@pytest.mark.parametrize("m", [1, 5, 17])
def test_int8_shapes(backend, check_close, make_int8, poisoned, m, n, k, group, has_minimum):
    """The same for 8 bits, with and without minima."""
    x, w = activations(m, k), make_int8(n, k, group, minimum=has_minimum)
    y = int8_matmul(x, w, poisoned(m, n), backend=backend)
    check_close("matmul_rounding", y, x.double() @ w.dequantize().double().T)
    if backend is Backend.CPU:
        check_close("matmul", y, matmul_rounded_activations(x, w))


@pytest.mark.parametrize("m", ROWS)
def test_every_number_of_rows(isa, check_close, make_int4, make_int8, m):
    """All row tiles and their remainders compute the same function."""
    x = activations(m, 96)
    four, eight = make_int4(40, 96), make_int8(40, 96)
    check_close("matmul", int4_matmul(x, four, backend=Backend.CPU), matmul_rounded_activations(x, four))
    check_close("matmul", int8_matmul(x, eight, backend=Backend.CPU), matmul_rounded_activations(x, eight))


def test_more_rows_than_one_cache_block(isa, check_close, make_int4):
    """Long prompts are computed in several sweeps over the weights."""
    x, w = activations(300, 64), make_int4(48, 64)
    check_close("matmul", int4_matmul(x, w, backend=Backend.CPU), matmul_rounded_activations(x, w))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_nibble_zero_point_and_position_is_exact(backend, group):
    """Column k of W comes out of a one-hot row exactly: for each nibble, zero point, scale and place."""
    n, k = 16 * len(ZERO_POINTS), 2 * group
    codes = ((torch.arange(n).unsqueeze(1) + torch.arange(k)) % 16).to(torch.uint8)
    scale = torch.tensor([2.0**-3, 2.0**4]).repeat(n, 1)
    zero_points = torch.tensor(ZERO_POINTS).repeat_interleave(16).unsqueeze(1)
    w = Int4Weight.from_codes(codes, scale.half(), (-zero_points * scale).half(), group)
    expected = (codes.float() - zero_points) * scale.repeat_interleave(group, dim=1)
    # MAX_CODE makes the step of a one-hot row's group 1; all products here fit in 24 bits.
    y = int4_matmul(torch.eye(k) * MAX_CODE, w, backend=backend)
    assert torch.equal(expected.T * MAX_CODE, y)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_every_byte_and_position_is_exact(backend, group):
    """The same for all 256 codes of 8-bit weights, -128 included, and both signs of the activation."""
    codes = ((torch.arange(256).unsqueeze(1) + torch.arange(2 * group)) % 256 - 128).to(torch.int8)
    scale = torch.tensor([2.0**-3, 2.0**4]).repeat(256, 1)
    w = Int8Weight.from_codes(codes, scale.half(), None, group)
    expected = codes.float() * scale.repeat_interleave(group, dim=1)
    for sign in (1, -1):
        y = int8_matmul(torch.eye(2 * group) * sign * MAX_CODE, w, backend=backend)
        assert torch.equal(expected.T * sign * MAX_CODE, y)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("low", [-127, 127])
def test_largest_sums_do_not_saturate(isa, sign, low):
    """Extreme codes in all columns at once stay exact where 16-bit sums of products would overflow."""
    code = sign * (126 * 256 + low)
    x = torch.full((3, 128), float(code))
    x[:, 0] = sign * MAX_CODE  # the largest magnitude, so that the step is 1
    total = code * 127 + sign * MAX_CODE
    four = Int4Weight.from_codes(
        torch.full((16, 128), 15, dtype=torch.uint8), torch.ones(16, 1), torch.zeros(16, 1), 128
    )
    assert torch.equal(torch.full((3, 16), float(15 * total)), int4_matmul(x, four, backend=Backend.CPU))
    for weight in (-128, 127):
        eight = Int8Weight.from_codes(torch.full((16, 128), weight, dtype=torch.int8), torch.ones(16, 1), None, 128)
        assert torch.equal(torch.full((3, 16), float(weight * total)), int8_matmul(x, eight, backend=Backend.CPU))


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-31, 1e-20, 1e20, 3e37])
def test_activations_of_any_magnitude(isa, make_int4, magnitude):
    """Zeros, denormals and huge values give what they should, never NaN."""
    x, w = torch.randn(2, 64).clamp(-1, 1) * magnitude, make_int4(16, 64)
    y = int4_matmul(x, w, backend=Backend.CPU)
    exact = x.double() @ w.dequantize().double().T
    assert float((y.double() - exact).abs().max()) <= 1e-3 * magnitude + 1e-28


def test_rounded_activations_lose_little():
    """Codes reach from -MAX_CODE to MAX_CODE, no low byte is -128, and no value moves by more than one step and a half."""
    x = activations(50, 128)
    codes, scale = quantize_activations(x, 32)
    assert int(codes.abs().max()) == MAX_CODE
    assert not bool(((codes & 255) == 128).any())
    moved = (codes * scale.unsqueeze(2)).flatten(1) - x
    assert bool((moved.abs() <= 1.51 * scale.repeat_interleave(32, dim=1)).all())


def test_rounded_activations_divide_once():
    """The codes of the reference are those of one float32 division, as in native code."""
    x = torch.randn(64, 128)
    amax = x.view(64, 4, 32).abs().amax(dim=2, keepdim=True).numpy()
    codes = np.rint(x.view(64, 4, 32).numpy() * (np.float32(MAX_CODE) / amax)).astype(np.int32)
    assert np.array_equal(codes + ((codes & 255) == 128), quantize_activations(x, 32)[0].numpy())
