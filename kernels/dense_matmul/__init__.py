"""Matrix product with unquantized weights."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output_rows
from kernels.dense_matmul.ref import matmul_float_activations
from kernels.errors import KernelError
from kernels.gpu_weights import GpuDenseWeight
from kernels.weights import DenseWeight

NATIVE_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def dense_matmul(
    x: torch.Tensor, w: DenseWeight | GpuDenseWeight, out: torch.Tensor | None = None, *, backend: Backend
) -> torch.Tensor:
    """x @ W.T: x float32 [M, K], W bf16, f16 or f32 [N, K]; float32 sums; returns float32 [M, N], in `out` if given."""
    wanted = GpuDenseWeight if backend is Backend.GPU else DenseWeight
    if not isinstance(w, wanted):
        raise KernelError(f"dense_matmul: w must be a {wanted.__name__}, got {type(w).__name__}")
    num_out, num_in = w.shape
    check_tensor("dense_matmul", "x", x, torch.float32, (None, num_in), backend)
    result, stride = output_rows("dense_matmul", out, (x.shape[0], num_out), backend)
    if isinstance(w, GpuDenseWeight):
        if result.numel():
            from kernels.dense_matmul.gpu import dense_matmul_gpu

            dense_matmul_gpu(x, w, result)
        return result
    if backend is Backend.REF:
        return result.copy_(matmul_float_activations(x, w))
    from kernels import _native

    kind = NATIVE_TYPES[w.packed.dtype]
    _native.dense_matmul(
        x.data_ptr(), x.shape[0], w.packed.data_ptr(), kind, num_out, num_in, result.data_ptr(), stride
    )
    return result
