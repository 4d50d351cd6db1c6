"""Root mean square normalization, with the residual sum before it."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output, sizes
from kernels.rms_norm.ref import rms_norm_ref


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """Normalize rows of x float32 [T, H] by weight float32 [H]; with `residual` [T, H], first residual += x in place, then the sum."""
    rows, size = sizes("rms_norm", "x", x, 2)
    check_tensor("rms_norm", "x", x, torch.float32, (None, size), backend)
    check_tensor("rms_norm", "weight", weight, torch.float32, (size,), backend)
    if residual is not None:
        check_tensor("rms_norm", "residual", residual, torch.float32, (rows, size), backend)
    result = output("rms_norm", out, (rows, size), backend)
    if backend is Backend.REF:
        source = x if residual is None else residual.add_(x)
        return result.copy_(rms_norm_ref(source, weight, eps))
    if backend is Backend.GPU:
        if result.numel():
            from kernels.rms_norm.gpu import rms_norm_gpu

            rms_norm_gpu(x, weight, eps, residual, result)
        return result
    from kernels import _native

    address = 0 if residual is None else residual.data_ptr()
    _native.rms_norm(x.data_ptr(), address, weight.data_ptr(), eps, rows, size, result.data_ptr())
    return result
