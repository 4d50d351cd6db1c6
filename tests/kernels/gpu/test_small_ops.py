"""RMS norm, rotary embedding and the gated activation for GPUs, interpreted: against float64, and row by row against themselves."""

import pytest
import torch

from kernels.add_bias import add_bias
from kernels.gelu_mul import gelu_mul
from kernels.head_norm import head_norm
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.silu_mul import silu_mul

SHAPES = [(1, 1), (3, 17), (2, 576), (5, 100), (1, 5000)]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm(gpu, check_close, poisoned, rows, size, with_residual):
    """Any width, wider than a program's step too; the residual takes the sum in place, x stays as it was, rows don't depend on others."""
    x, weight, residual = torch.randn(rows, size) * 10, torch.randn(size), torch.randn(rows, size)
    before, expected = x.clone(), residual + x if with_residual else x.double()
    given = residual.clone() if with_residual else None
    y = rms_norm(x, weight, 1e-5, residual=given, out=poisoned(rows, size), backend=gpu)
    wide = expected.double()
    check_close("rms_norm", y, wide / (wide.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double())
    assert torch.equal(before, x)
    if with_residual:
        assert torch.equal(expected, given)
    last = residual[-1:].clone() if with_residual else None
    assert torch.equal(y[-1:], rms_norm(x[-1:].clone(), weight, 1e-5, residual=last, backend=gpu))


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 2), (3, 2, 8), (5, 9, 64), (2, 3, 80)])
def test_rotary(gpu, check_close, rows, heads, dim):
    """Pairs (i, i + D/2) turn by position times frequency, also at positions far out."""
    inv_freq = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    x, positions = torch.randn(rows, heads, dim), torch.randint(0, 8192, (rows,), dtype=torch.int32)
    angle = (positions.double().unsqueeze(1) * inv_freq).unsqueeze(1)
    first, second = x.double().chunk(2, dim=2)
    turned = torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=2)
    rotary(x, positions, rotary_table(inv_freq, 8192), backend=gpu)
    check_close("rotary", x, turned)


def test_rotary_of_a_part(gpu):
    """A part of each head turns where it lies, with the bits that it has alone, and nothing around it changes."""
    whole, table = torch.randn(3, 5, 24), rotary_table(torch.rand(5), 64)
    before, positions = whole.clone(), torch.randint(0, 64, (3,), dtype=torch.int32)
    turned = whole[:, 1:-1, 2:12].clone()
    rotary(turned, positions, table, backend=gpu)
    rotary(whole[:, 1:-1, 2:12], positions, table, backend=gpu)
    assert torch.equal(turned, whole[:, 1:-1, 2:12])
    whole[:, 1:-1, 2:12] = before[:, 1:-1, 2:12]
    assert torch.equal(before, whole)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 1), (3, 2, 17), (4, 3, 128)])
def test_head_norm(gpu, check_close, rows, heads, dim):
    """Each head is normalized by itself, in place, among neighbours that stay."""
    whole, weight = torch.randn(rows, heads + 2, dim) * 7, torch.randn(dim)
    before = whole.clone()
    head_norm(whole[:, 1:-1], weight, 1e-6, backend=gpu)
    wide = before[:, 1:-1].double()
    exact = wide / (wide.square().mean(dim=2, keepdim=True) + 1e-6).sqrt() * weight.double()
    check_close("rms_norm", whole[:, 1:-1], exact)
    assert torch.equal(before[:, [0, -1]], whole[:, [0, -1]])


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_add_bias(gpu, rows, size):
    """Every row of a part of a wider tensor takes the vector; the rest stays."""
    whole, bias = torch.randn(rows, size + 3), torch.randn(size)
    expected = whole.clone()
    expected[:, 1 : size + 1] += bias
    add_bias(whole[:, 1 : size + 1], bias, backend=gpu)
    assert torch.equal(expected, whole)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_gelu_mul(gpu, check_close, poisoned, rows, size):
    """gelu(gate) * up, written whole; huge gates pass or are shut."""
    gate_up = torch.randn(rows, 2 * size) * 4
    y = gelu_mul(gate_up, poisoned(rows, size), backend=gpu)
    gate, up = gate_up.double().chunk(2, dim=1)
    check_close("gelu_mul", y, torch.nn.functional.gelu(gate, approximate="tanh") * up)
    huge = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 2.0, 3.0]])
    assert torch.equal(torch.tensor([[-0.0, 2e4, 0.0]]), gelu_mul(huge, backend=gpu))


def test_rotary_looks_at_no_position_before_it_starts(gpu):
    """Padding stays as it was, a position beyond the table gives NaN, and neither touches a neighbour's row."""
    table, x = rotary_table(torch.rand(4), 4), torch.randn(3, 2, 8)
    padded, turned = x.clone(), x[2:].clone()
    rotary(padded, torch.tensor([-1, 4, 3], dtype=torch.int32), table, backend=gpu)
    rotary(turned, torch.tensor([3], dtype=torch.int32), table, backend=gpu)
    assert torch.equal(x[0], padded[0])
    assert bool(padded[1].isnan().all())
    assert torch.equal(turned, padded[2:])


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_silu_mul(gpu, check_close, poisoned, rows, size):
    """silu(gate) * up, written whole."""
    gate_up = torch.randn(rows, 2 * size) * 4
    y = silu_mul(gate_up, poisoned(rows, size), backend=gpu)
    gate, up = gate_up.double().chunk(2, dim=1)
    check_close("silu_mul", y, gate * torch.sigmoid(gate) * up)
    assert torch.equal(y[-1:], silu_mul(gate_up[-1:].clone(), backend=gpu))


def test_silu_mul_of_huge_numbers(gpu):
    """Gates far beyond where the exponential overflows give zero or the gate, never NaN."""
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 2.0, 3.0]])
    assert torch.equal(torch.tensor([[-0.0, 2e4, 0.0]]), silu_mul(gate_up, backend=gpu))
