"""Some rows of a matrix, one behind the other."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output, sizes
from kernels.errors import KernelError
from kernels.take_rows.ref import take_rows_ref


def take_rows(
    x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None, *, backend: Backend
) -> torch.Tensor:
    """x float32 [T, H], rows int64 [R] -> float32 [R, H], in `out` if given. Raises KernelError for a row outside x."""
    num_rows, size = sizes("take_rows", "x", x, 2)
    check_tensor("take_rows", "x", x, torch.float32, (None, size), backend)
    check_tensor("take_rows", "rows", rows, torch.int64, (None,), backend)
    # A look at a GPU's numbers would wait for it: there torch's own kernel checks them.
    if len(rows) and backend is not Backend.GPU:
        numbers = rows.numpy()
        if not 0 <= numbers.min() <= numbers.max() < num_rows:
            raise KernelError(f"take_rows: rows must be in [0, {num_rows})")
    result = output("take_rows", out, (len(rows), size), backend)
    if backend is Backend.GPU:
        return torch.index_select(x, 0, rows, out=result)
    if backend is Backend.REF:
        return result.copy_(take_rows_ref(x, rows))
    from kernels import _native

    _native.take_rows(x.data_ptr(), rows.data_ptr(), len(rows), size, result.data_ptr())
    return result
