"""A vector added to every row."""

import torch

from kernels.add_bias.ref import add_bias_ref
from kernels.backend import Backend
from kernels.checks import check_rows, check_tensor, sizes


def add_bias(x: torch.Tensor, bias: torch.Tensor, *, backend: Backend) -> None:
    """x float32 [T, N] += bias float32 [N], in place. Rows of x may lie further apart than they are long."""
    rows, size = sizes("add_bias", "x", x, 2)
    stride = check_rows("add_bias", "x", x, (None, size), backend)
    check_tensor("add_bias", "bias", bias, torch.float32, (size,), backend)
    if backend is Backend.REF:
        add_bias_ref(x, bias)
        return
    if backend is Backend.GPU:
        if x.numel():
            from kernels.add_bias.gpu import add_bias_gpu

            add_bias_gpu(x, bias)
        return
    from kernels import _native

    _native.add_bias(x.data_ptr(), stride, bias.data_ptr(), rows, size)
