"""Matrix product with weights in 8-bit floats."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output_rows
from kernels.errors import KernelError
from kernels.fp8_matmul.ref import matmul_float_activations
from kernels.gpu_weights import GpuFp8Weight
from kernels.weights import Fp8Weight


def fp8_matmul(
    x: torch.Tensor, w: Fp8Weight | GpuFp8Weight, out: torch.Tensor | None = None, *, backend: Backend
) -> torch.Tensor:
    """x @ W.T: x float32 [M, K], any M; W [N, K]; returns float32 [M, N], in `out` if given.

    Codes are decoded exactly; on CPU activations stay float32 and sums are float32, on a GPU activations are rounded to float16 as for
    `int4_matmul`. Each group of 128 columns is added up before it is multiplied with its scale, and groups are added in their order.
    """
    wanted = GpuFp8Weight if backend is Backend.GPU else Fp8Weight
    if not isinstance(w, wanted):
        raise KernelError(f"fp8_matmul: w must be a {wanted.__name__}, got {type(w).__name__}")
    num_out, num_in = w.shape
    check_tensor("fp8_matmul", "x", x, torch.float32, (None, num_in), backend)
    result, stride = output_rows("fp8_matmul", out, (x.shape[0], num_out), backend)
    if isinstance(w, GpuFp8Weight):
        if result.numel():
            from kernels.fp8_matmul.gpu import fp8_matmul_gpu

            fp8_matmul_gpu(x, w, result)
        return result
    if backend is Backend.REF:
        return result.copy_(matmul_float_activations(x, w))
    from kernels import _native

    _native.fp8_matmul(x.data_ptr(), x.shape[0], w.packed.data_ptr(), num_out, num_in, result.data_ptr(), stride)
    return result
