"""Rotary position embedding."""

import torch

from kernels.backend import Backend
from kernels.checks import check_heads, check_tensor, sizes
from kernels.errors import KernelError
from kernels.rotary.ref import rotary_ref


def rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, backend: Backend) -> None:
    """Rotate x float32 [T, heads, D] in place by positions int32 [T]; `table` is rotary_table's float32 [positions, 2, D/2].

    Rows and heads of x may lie anywhere apart: to rotate a part of each head, pass that part.
    """
    rows, heads, dim = sizes("rotary", "x", x, 3)
    if dim % 2:
        raise KernelError(f"rotary: x must have an even head size, got {dim}")
    row_stride, head_stride = check_heads("rotary", "x", x, (rows, heads, dim), backend)
    check_tensor("rotary", "positions", positions, torch.int32, (rows,), backend)
    check_tensor("rotary", "table", table, torch.float32, (None, 2, dim // 2), backend)
    # A look at a GPU's numbers would wait for it: there a negative position is padding, and one beyond the table gives NaN.
    if rows and backend is not Backend.GPU:
        numbers = positions.numpy()
        if not 0 <= numbers.min() <= numbers.max() < table.shape[0]:
            raise KernelError(f"rotary: positions must be in [0, {table.shape[0]})")
    if backend is Backend.REF:
        rotary_ref(x, positions, table)
        return
    if backend is Backend.GPU:
        if x.numel():
            from kernels.rotary.gpu import rotary_gpu

            rotary_gpu(x, positions, table)
        return
    from kernels import _native

    _native.rotary(x.data_ptr(), row_stride, head_stride, positions.data_ptr(), table.data_ptr(), rows, heads, dim)
