"""Embedding, RMS norm, rotary embedding and the gated activation against float64."""

import pytest
import torch

from kernels.add_bias import add_bias
from kernels.backend import Backend
from kernels.embedding import embedding
from kernels.errors import KernelError
from kernels.gelu_mul import gelu_mul
from kernels.head_norm import head_norm
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.silu_mul import silu_mul
from kernels.weights import DenseWeight

SHAPES = [(1, 1), (1, 576), (3, 17), (7, 64), (17, 100), (130, 576)]


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight in float64."""
    wide = x.double()
    return wide / (wide.square().mean(dim=1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm(backend, check_close, poisoned, rows, size):
    """Any number of rows of any width is normalized and written whole; x stays as it was."""
    x, weight = torch.randn(rows, size) * 10, torch.randn(size)
    before = x.clone()
    y = rms_norm(x, weight, 1e-5, out=poisoned(rows, size), backend=backend)
    check_close("rms_norm", y, exact_norm(x, weight, 1e-5))
    assert torch.equal(before, x)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm_with_residual(backend, check_close, rows, size):
    """The residual takes the sum in place, and the norm is that of the sum."""
    x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    expected = residual + x
    y = rms_norm(x, weight, 1e-6, residual=residual, backend=backend)
    assert torch.equal(expected, residual)
    check_close("rms_norm", y, exact_norm(expected, weight, 1e-6))


def test_rms_norm_of_zeros(backend):
    """A row of zeros stays zero."""
    assert torch.equal(torch.zeros(2, 40), rms_norm(torch.zeros(2, 40), torch.ones(40), 1e-6, backend=backend))


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 2), (3, 2, 8), (17, 9, 64), (70, 3, 80)])
def test_rotary(backend, check_close, rows, heads, dim):
    """Pairs (i, i + D/2) turn by position times frequency, also at positions far out."""
    inv_freq = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    x, positions = torch.randn(rows, heads, dim), torch.randint(0, 8192, (rows,), dtype=torch.int32)
    angle = (positions.double().unsqueeze(1) * inv_freq).unsqueeze(1)
    first, second = x.double().chunk(2, dim=2)
    turned = torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=2)
    rotary(x, positions, rotary_table(inv_freq, 8192), backend=backend)
    check_close("rotary", x, turned)


def test_rotary_at_position_zero_changes_nothing(backend):
    """The first token's vector keeps its bits."""
    x = torch.randn(2, 3, 16)
    before = x.clone()
    rotary(x, torch.zeros(2, dtype=torch.int32), rotary_table(torch.rand(8), 4), backend=backend)
    assert torch.equal(before, x)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_silu_mul(backend, check_close, poisoned, rows, size):
    """silu(gate) * up for any number of rows of any width, written whole."""
    gate_up = torch.randn(rows, 2 * size) * 4
    y = silu_mul(gate_up, poisoned(rows, size), backend=backend)
    gate, up = gate_up.double().chunk(2, dim=1)
    check_close("silu_mul", y, gate * torch.sigmoid(gate) * up)


def test_silu_mul_of_large_gates(backend):
    """The exponential neither overflows nor leaves NaN: a large gate passes, a large negative one is shut."""
    gates = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    y = silu_mul(torch.cat([gates, torch.ones_like(gates)], dim=1), backend=backend)
    assert torch.equal(torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e30]]), y)


@pytest.mark.parametrize(("rows", "heads", "dim", "part"), [(1, 2, 8, 4), (9, 3, 24, 10), (33, 5, 64, 32)])
def test_rotary_of_a_part(backend, check_close, rows, heads, dim, part):
    """A part of each head of each row turns where it lies, and nothing around it changes."""
    whole, table = torch.randn(rows, heads + 2, dim), rotary_table(torch.rand(part // 2), 64)
    before, positions = whole.clone(), torch.randint(0, 64, (rows,), dtype=torch.int32)
    turned = whole[:, 1:-1, 2 : 2 + part].clone()
    rotary(turned, positions, table, backend=backend)
    rotary(whole[:, 1:-1, 2 : 2 + part], positions, table, backend=backend)
    assert torch.equal(turned, whole[:, 1:-1, 2 : 2 + part])
    whole[:, 1:-1, 2 : 2 + part] = before[:, 1:-1, 2 : 2 + part]
    assert torch.equal(before, whole)


def test_heads_that_overlap_are_refused(backend):
    """A view whose heads share numbers can't be turned in place."""
    with pytest.raises(KernelError, match="overlap"):
        rotary(
            torch.zeros(64).as_strided((2, 3, 8), (24, 4, 1)),
            torch.zeros(2, dtype=torch.int32),
            rotary_table(torch.rand(4), 4),
            backend=backend,
        )


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 1), (3, 2, 17), (40, 3, 128), (5, 4, 256)])
def test_head_norm(backend, check_close, rows, heads, dim):
    """Each head is normalized by itself, in place, among neighbours that stay."""
    whole, weight = torch.randn(rows, heads + 2, dim) * 7, torch.randn(dim)
    before = whole.clone()
    head_norm(whole[:, 1:-1], weight, 1e-6, backend=backend)
    expected = exact_norm(before[:, 1:-1].reshape(-1, dim), weight, 1e-6).view(rows, heads, dim)
    check_close("rms_norm", whole[:, 1:-1], expected)
    assert torch.equal(before[:, [0, -1]], whole[:, [0, -1]])


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_add_bias(backend, rows, size):
    """Every row of a part of a wider tensor takes the vector; the rest stays."""
    whole, bias = torch.randn(rows, size + 3), torch.randn(size)
    expected = whole.clone()
    expected[:, 1 : size + 1] += bias
    add_bias(whole[:, 1 : size + 1], bias, backend=backend)
    assert torch.equal(expected, whole)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_gelu_mul(backend, check_close, poisoned, rows, size):
    """gelu(gate) * up for any number of rows of any width, written whole."""
    gate_up = torch.randn(rows, 2 * size) * 4
    y = gelu_mul(gate_up, poisoned(rows, size), backend=backend)
    gate, up = gate_up.double().chunk(2, dim=1)
    check_close("gelu_mul", y, torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_gelu_mul_of_large_gates(backend):
    """A gate whose cube overflows passes or is shut, without NaN."""
    gates = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    y = gelu_mul(torch.cat([gates, torch.ones_like(gates)], dim=1), backend=backend)
    assert torch.equal(torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e30]]), y)


def test_embedding_takes_rows(backend, make_int4, make_int8):
    """Rows come dequantized, in the order of the ids, from a matrix of any kind."""
    ids = torch.tensor([16, 0, 32, 16])
    dense = [DenseWeight.from_matrix(torch.randn(33, 5).to(t)) for t in (torch.bfloat16, torch.float16, torch.float32)]
    for weight in (make_int4(33, 64), make_int8(33, 64), *dense):
        assert torch.equal(weight.dequantize()[ids], embedding(ids, weight, backend=backend))
        assert torch.equal(weight.dequantize()[ids] * 25.3, embedding(ids, weight, factor=25.3, backend=backend))


def test_no_rows_are_no_error(backend, make_int4):
    """Every op takes an empty batch."""
    assert (0, 8) == tuple(rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6, backend=backend).shape)
    assert (0, 4) == tuple(silu_mul(torch.zeros(0, 8), backend=backend).shape)
    assert (0, 64) == tuple(embedding(torch.zeros(0, dtype=torch.int64), make_int4(3, 64), backend=backend).shape)
    rotary(torch.zeros(0, 2, 8), torch.zeros(0, dtype=torch.int32), torch.zeros(4, 2, 4), backend=backend)


def test_instruction_sets_agree_bit_for_bit(on_each_isa):
    """The small ops round at the same places in each instruction set."""
    x, weight, positions = torch.randn(40, 96) * 3, torch.randn(96), torch.arange(40, dtype=torch.int32)
    table = rotary_table(torch.rand(24), 64)

    def call() -> torch.Tensor:
        turned = rms_norm(x, weight, 1e-6, backend=Backend.CPU).view(40, 2, 48)
        head_norm(turned, weight[:48], 1e-6, backend=Backend.CPU)
        rotary(turned, positions, table, backend=Backend.CPU)
        return torch.cat([gate(turned.view(40, 96), backend=Backend.CPU) for gate in (silu_mul, gelu_mul)])

    results = list(on_each_isa(call).values())
    for other in results[1:]:
        assert torch.equal(results[0], other)
