"""Layer normalization."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output, sizes
from kernels.layer_norm.ref import layer_norm_ref


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """Rows of x float32 [T, H] to mean 0 and variance 1, times weight float32 [H], plus bias float32 [H]. `out` may be x."""
    rows, size = sizes("layer_norm", "x", x, 2)
    check_tensor("layer_norm", "x", x, torch.float32, (None, size), backend)
    check_tensor("layer_norm", "weight", weight, torch.float32, (size,), backend)
    check_tensor("layer_norm", "bias", bias, torch.float32, (size,), backend)
    result = output("layer_norm", out, (rows, size), backend)
    if backend is Backend.REF:
        return result.copy_(layer_norm_ref(x, weight, bias, eps))
    if backend is Backend.GPU:
        if result.numel():
            from kernels.layer_norm.gpu import layer_norm_gpu

            layer_norm_gpu(x, weight, bias, eps, result)
        return result
    from kernels import _native

    _native.layer_norm(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), eps, rows, size, result.data_ptr())
    return result
