"""Root mean square normalization of each head."""

import torch

from kernels.backend import Backend
from kernels.checks import check_heads, check_tensor, sizes
from kernels.head_norm.ref import head_norm_ref


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend) -> None:
    """Normalize each head of x float32 [T, heads, D] by weight float32 [D], in place. Rows and heads of x may lie anywhere apart."""
    rows, heads, dim = sizes("head_norm", "x", x, 3)
    row_stride, head_stride = check_heads("head_norm", "x", x, (rows, heads, dim), backend)
    check_tensor("head_norm", "weight", weight, torch.float32, (dim,), backend)
    if backend is Backend.REF:
        head_norm_ref(x, weight, eps)
        return
    if backend is Backend.GPU:
        if x.numel():
            from kernels.head_norm.gpu import head_norm_gpu

            head_norm_gpu(x, weight, eps)
        return
    from kernels import _native

    _native.head_norm(x.data_ptr(), row_stride, head_stride, weight.data_ptr(), eps, rows, heads, dim)
