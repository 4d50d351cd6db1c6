"""Matrix product with 8-bit weights."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output_rows
from kernels.errors import KernelError
from kernels.gpu_weights import GpuInt8Weight
from kernels.int4_matmul.device import quantized_matmul_gpu
from kernels.int4_matmul.native import quantized_matmul
from kernels.int8_matmul.ref import matmul_float_activations
from kernels.weights import Int8Weight


def int8_matmul(
    x: torch.Tensor, w: Int8Weight | GpuInt8Weight, out: torch.Tensor | None = None, *, backend: Backend
) -> torch.Tensor:
    """x @ W.T: x float32 [M, K], any M; W [N, K]; returns float32 [M, N], in `out` if given. Activations as in `int4_matmul`."""
    if backend is Backend.GPU:
        return quantized_matmul_gpu("int8_matmul", x, w, GpuInt8Weight, out)
    if not isinstance(w, Int8Weight):
        raise KernelError(f"int8_matmul: w must be an Int8Weight, got {type(w).__name__}")
    if backend is Backend.REF:
        check_tensor("int8_matmul", "x", x, torch.float32, (None, w.shape[1]))
        result, _ = output_rows("int8_matmul", out, (x.shape[0], w.shape[0]))
        return result.copy_(matmul_float_activations(x, w))
    return quantized_matmul("int8_matmul", x, w, out)
