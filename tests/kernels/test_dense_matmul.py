"""Products with unquantized weights."""

import pytest
import torch

from kernels.dense_matmul import dense_matmul
from kernels.weights import DenseWeight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (33, 61), (100, 130)])
@pytest.mark.parametrize("m", [1, 3, 4, 17])
def test_shapes(backend, check_close, poisoned, m, n, k, dtype):
    """Any numbers of rows, inputs and outputs: the product is right and all of it written."""
    x, w = torch.randn(m, k), DenseWeight.from_matrix(torch.randn(n, k).to(dtype))
    y = dense_matmul(x, w, poisoned(m, n), backend=backend)
    check_close("matmul", y, x.double() @ w.dequantize().double().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_beyond_float16_stay_finite(backend, check_close, dtype):
    """Activations and weights that float16 could not hold give a finite, right product."""
    x, w = torch.randn(3, 64) * 1e5, DenseWeight.from_matrix((torch.randn(20, 64) * 1e5).to(dtype))
    check_close("matmul", dense_matmul(x, w, backend=backend), x.double() @ w.dequantize().double().T)


def test_float16_subnormals_count(backend):
    """The smallest float16 weight is not flushed to zero."""
    w = DenseWeight.from_matrix(torch.full((16, 4), 2.0**-24, dtype=torch.float16))
    assert torch.equal(torch.full((1, 16), 4.0), dense_matmul(torch.full((1, 4), 2.0**24), w, backend=backend))
