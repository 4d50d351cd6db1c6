"""Matrix product with 4-bit weights."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output_rows
from kernels.errors import KernelError
from kernels.gpu_weights import GpuInt4Weight
from kernels.int4_matmul.device import quantized_matmul_gpu
from kernels.int4_matmul.native import quantized_matmul
from kernels.int4_matmul.ref import matmul_float_activations
from kernels.weights import Int4Weight


def int4_matmul(
    x: torch.Tensor, w: Int4Weight | GpuInt4Weight, out: torch.Tensor | None = None, *, backend: Backend
) -> torch.Tensor:
    """x @ W.T: x float32 [M, K], any M; W [N, K]; returns float32 [M, N], in `out` if given.

    W is an Int4Weight, for the GPU a GpuInt4Weight. On CPU the activations are rounded to 16 bits, symmetric per row and group, so that each group's dot product is an exact integer and a
    row's bits are the same at every M. A row that holds NaN or infinity gives NaN, and touches no other row.
    """
    if backend is Backend.GPU:
        return quantized_matmul_gpu("int4_matmul", x, w, GpuInt4Weight, out)
    if not isinstance(w, Int4Weight):
        raise KernelError(f"int4_matmul: w must be an Int4Weight, got {type(w).__name__}")
    if backend is Backend.REF:
        check_tensor("int4_matmul", "x", x, torch.float32, (None, w.shape[1]))
        result, _ = output_rows("int4_matmul", out, (x.shape[0], w.shape[0]))
        return result.copy_(matmul_float_activations(x, w))
    return quantized_matmul("int4_matmul", x, w, out)
