"""Products with activations rounded to 8 bits: right by their own rounding, and with the same bits in any batch and on any machine."""

from collections.abc import Callable

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.int4_matmul import int4_matmul
from kernels.int4_matmul.ref import MAX_BYTE, matmul_rounded_activations, quantize_activations
from kernels.int8_matmul import int8_matmul
from kernels.weights import Int4Weight, Int8Weight, Quantized

ROWS = [1, 2, 8, 9, 17, 32, 33, 70]
Product = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def narrow(isa: str) -> str:
    """Each instruction set, told to round activations to 8 bits."""
    _native.select(isa, 8)
    return isa


def _product(w: Quantized) -> Product:
    if isinstance(w, Int4Weight):
        return lambda x: int4_matmul(x, w, backend=Backend.CPU)
    return lambda x: int8_matmul(x, w, backend=Backend.CPU)


@pytest.fixture(params=["int4-32", "int4-128", "int8-16", "int8-64-minimum"])
def weight(request: pytest.FixtureRequest, make_int4, make_int8) -> Quantized:
    """Matrices [70, 256] of both kinds: pairs of panels, a single one, and one that is not full."""
    made: dict[str, Callable[[], Quantized]] = {
        "int4-32": lambda: make_int4(70, 256),
        "int4-128": lambda: make_int4(70, 256, 128),
        "int8-16": lambda: make_int8(70, 256, 16),
        "int8-64-minimum": lambda: make_int8(70, 256, 64, torch.float32, minimum=True),
    }
    return made[request.param]()


@pytest.mark.parametrize("m", ROWS)
def test_products(narrow, check_close, weight, m):
    """Against float64 with the same rounding; against unrounded activations the error is that of 8 bits, no more and no less."""
    x = torch.randn(m, 256)
    y = _product(weight)(x)
    check_close("matmul", y, matmul_rounded_activations(x, weight, 8))
    exact = x.double() @ weight.dequantize().double().T
    error = float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert 1e-4 < error < 3e-2


@pytest.mark.parametrize("m", ROWS)
def test_rows_alone_and_in_a_batch(narrow, weight, m):
    """Each row of a batch of any size has the bits that it has alone."""
    x, product = torch.randn(m, 256) * 20, _product(weight)
    alone = torch.cat([product(x[row : row + 1].clone()) for row in range(m)])
    assert torch.equal(alone, product(x))


def test_instruction_sets_change_no_bit(on_each_isa, weight, monkeypatch):
    """Portable code, AVX2 and AVX-512 give the same bits."""
    select = _native.select
    monkeypatch.setattr(_native, "select", lambda isa: select(isa, 8))
    x, product = torch.randn(41, 256) * 20, _product(weight)
    results = list(on_each_isa(lambda: product(x)).values())
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_nibble_and_position_is_exact(narrow, group):
    """Column k of W comes out of a one-hot row exactly, for both signs."""
    n, k = 64, 2 * group
    codes = ((torch.arange(n).unsqueeze(1) + torch.arange(k)) % 16).to(torch.uint8)
    scale = torch.tensor([2.0**-3, 2.0**4]).repeat(n, 1)
    w = Int4Weight.from_codes(codes, scale.half(), (-8 * scale).half(), group)
    expected = (codes.float() - 8) * scale.repeat_interleave(group, dim=1)
    for sign in (1, -1):
        assert torch.equal(expected.T * sign * MAX_BYTE, _product(w)(torch.eye(k) * sign * MAX_BYTE))


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_do_not_saturate(narrow, sign):
    """Extreme codes in all columns at once stay exact where 16-bit sums of products would overflow."""
    x = torch.full((10, 128), float(sign * MAX_BYTE))
    four = Int4Weight.from_codes(
        torch.full((48, 128), 15, dtype=torch.uint8), torch.ones(48, 1), torch.zeros(48, 1), 128
    )
    assert torch.equal(torch.full((10, 48), 15.0 * sign * MAX_BYTE * 128), _product(four)(x))
    for code in (-128, 127):
        eight = Int8Weight.from_codes(torch.full((48, 128), code, dtype=torch.int8), torch.ones(48, 1), None, 128)
        assert torch.equal(torch.full((10, 48), float(code * sign * MAX_BYTE * 128)), _product(eight)(x))


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_harms_no_other(narrow, weight, fault):
    """NaN or infinity in a row leaves its neighbours' bits alone, and is not laundered into numbers."""
    x, product = torch.randn(12, 256), _product(weight)
    healthy, others = product(x), [row for row in range(12) if row != 4]
    x[4, 40] = fault
    result = product(x)
    assert torch.equal(healthy[others], result[others])
    assert bool(torch.isnan(result[4]).all())


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-31, 1e-20, 1e20, 3e37])
def test_activations_of_any_magnitude(narrow, make_int4, magnitude):
    """Zeros, denormals and huge values give what they should, never NaN."""
    x, w = torch.randn(2, 64).clamp(-1, 1) * magnitude, make_int4(16, 64)
    exact = x.double() @ w.dequantize().double().T
    assert float((_product(w)(x).double() - exact).abs().max()) <= 2e-1 * magnitude + 1e-28


def test_codes_are_symmetric():
    """Codes reach from -127 to 127, and no value moves by more than half a step."""
    x = torch.randn(50, 128)
    codes, scale = quantize_activations(x, 32, 8)
    assert int(codes.abs().max()) == MAX_BYTE
    moved = (codes * scale.unsqueeze(2)).flatten(1) - x
    assert bool((moved.abs() <= 0.501 * scale.repeat_interleave(32, dim=1)).all())
