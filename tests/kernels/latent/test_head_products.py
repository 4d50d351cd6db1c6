"""Products with a matrix for each head, and layer normalization: against float64, and the same bits in any batch."""

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.head_matmul import HeadWeights, head_matmul
from kernels.layer_norm import layer_norm

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "n", "k"), [(1, 1, 1, 1), (1, 3, 40, 24), (7, 5, 17, 33), (33, 2, 64, 128)])
def test_head_matmul(backend, check_close, poisoned, rows, heads, n, k, dtype):
    """Each head's vector meets its own matrix; rows of x may lie apart; odd sizes; written whole."""
    matrices, wide = torch.randn(heads, n, k).to(DTYPES[dtype]), torch.randn(rows, heads * k + 5)
    x, w = wide[:, : heads * k].unflatten(1, (heads, k)), HeadWeights.from_matrices(matrices, backend)
    assert torch.equal(matrices.float(), w.matrices())
    out = head_matmul(x, w, poisoned(rows, heads, n), backend=backend)
    check_close("matmul", out, torch.einsum("thk,hnk->thn", x.double(), matrices.double()))
    alone = torch.cat([head_matmul(x[row : row + 1].clone(), w, backend=backend) for row in range(rows)])
    assert torch.equal(alone, out)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 17), (40, 128), (2, 1000)])
def test_layer_norm(backend, check_close, rows, size):
    """Mean 0 and variance 1, then weight and bias; in place too; each row by itself."""
    x, weight, bias = torch.randn(rows, size) * 7 + 3, torch.randn(size), torch.randn(size)
    exact = torch.nn.functional.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-6)
    result = layer_norm(x, weight, bias, 1e-6, backend=backend)
    check_close("layer_norm", result, exact)
    alone = torch.cat([layer_norm(row[None], weight, bias, 1e-6, backend=backend) for row in x])
    assert torch.equal(alone, result)
    assert torch.equal(result, layer_norm(x, weight, bias, 1e-6, out=x, backend=backend))


def test_threads_and_instruction_sets_change_no_bit(on_each_isa):
    """Portable code, AVX2 and AVX-512, on any number of threads."""
    x, w = torch.randn(9, 4, 50), HeadWeights.from_matrices(torch.randn(4, 33, 50).half(), Backend.CPU)
    weight, bias = torch.randn(50), torch.randn(50)

    def call() -> torch.Tensor:
        normal = layer_norm(x.view(-1, 50), weight, bias, 1e-6, backend=Backend.CPU).view(9, 4, 50)
        return head_matmul(normal, w, backend=Backend.CPU)

    results = list(on_each_isa(call).values())
    for count in (1, 2, 3, 8):
        _native.set_num_threads(count)
        results.append(call())
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_bad_arguments_are_named(backend):
    """Matrices that aren't, and rows that don't fit them."""
    with pytest.raises(KernelError, match="HeadWeights: expected"):
        HeadWeights.from_matrices(torch.zeros(2, 3), backend)
    with pytest.raises(KernelError, match="HeadWeights: expected"):
        HeadWeights.from_matrices(torch.zeros(2, 3, 4, dtype=torch.float64), backend)
    w = HeadWeights.from_matrices(torch.zeros(2, 3, 4), backend)
    with pytest.raises(KernelError, match="head_matmul: x must have shape"):
        head_matmul(torch.zeros(5, 2, 3), w, backend=backend)
    with pytest.raises(KernelError, match="head_matmul: out must have shape"):
        head_matmul(torch.zeros(5, 2, 4), w, torch.zeros(5, 2, 4), backend=backend)
    with pytest.raises(KernelError, match="layer_norm: bias must have shape"):
        layer_norm(torch.zeros(2, 3), torch.zeros(3), torch.zeros(4), 1e-6, backend=backend)
