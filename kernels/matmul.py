"""The matrix product for a weight of any kind."""

import torch

from kernels.backend import Backend
from kernels.dense_matmul import dense_matmul
from kernels.fp8_matmul import fp8_matmul
from kernels.gpu_weights import GpuDenseWeight, GpuFp8Weight, GpuInt4Weight
from kernels.int4_matmul import int4_matmul
from kernels.int8_matmul import int8_matmul
from kernels.weights import AnyWeight, DenseWeight, Fp8Weight, Int4Weight


def matmul(x: torch.Tensor, w: AnyWeight, out: torch.Tensor | None = None, *, backend: Backend) -> torch.Tensor:
    """x float32 [M, K] @ W.T -> float32 [M, N], in `out` if given: columns of a wider tensor will do."""
    if isinstance(w, Int4Weight | GpuInt4Weight):
        return int4_matmul(x, w, out, backend=backend)
    if isinstance(w, DenseWeight | GpuDenseWeight):
        return dense_matmul(x, w, out, backend=backend)
    if isinstance(w, Fp8Weight | GpuFp8Weight):
        return fp8_matmul(x, w, out, backend=backend)
    return int8_matmul(x, w, out, backend=backend)
