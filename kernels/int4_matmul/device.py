"""The checks before the GPU's quantized product, for 4 and 8 bits. Imports no Triton until there is something to multiply."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output_rows
from kernels.errors import KernelError
from kernels.gpu_weights import GpuInt4Weight, GpuInt8Weight


def quantized_matmul_gpu(
    op: str, x: torch.Tensor, w: object, kind: type[GpuInt4Weight | GpuInt8Weight], out: torch.Tensor | None
) -> torch.Tensor:
    """float32 [M, K] x placed weights -> float32 [M, N]."""
    if not isinstance(w, kind):
        raise KernelError(f"{op}: w must be a {kind.__name__}, see kernels.placement; got {type(w).__name__}")
    num_out, num_in = w.shape
    check_tensor(op, "x", x, torch.float32, (None, num_in), Backend.GPU)
    result = output_rows(op, out, (x.shape[0], num_out), Backend.GPU)[0]
    if result.numel():
        from kernels.int4_matmul.gpu import quantized_matmul

        quantized_matmul(x if w.order is None else x.index_select(1, w.order), w, result)
    return result
