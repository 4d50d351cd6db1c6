"""The matrix product for a weight of any kind."""

import torch

from kernels.backend import Backend
from kernels.dense_matmul import dense_matmul
from kernels.int4_matmul import int4_matmul
from kernels.int8_matmul import int8_matmul
from kernels.weights import DenseWeight, Int4Weight, Weight


def matmul(x: torch.Tensor, w: Weight, out: torch.Tensor | None = None, *, backend: Backend) -> torch.Tensor:
    """x float32 [M, K] @ W.T -> float32 [M, N], in `out` if given: columns of a wider tensor will do."""
    if isinstance(w, Int4Weight):
        return int4_matmul(x, w, out, backend=backend)
    if isinstance(w, DenseWeight):
        return dense_matmul(x, w, out, backend=backend)
    return int8_matmul(x, w, out, backend=backend)
