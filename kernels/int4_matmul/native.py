"""The native quantized product, for 4 and 8 bits. See `native/ops_impl.hpp`."""

import torch

from kernels.checks import check_tensor, output_rows
from kernels.weights import Quantized


def quantized_matmul(op: str, x: torch.Tensor, w: Quantized, out: torch.Tensor | None) -> torch.Tensor:
    """float32 [M, K] x packed weights -> float32 [M, N]."""
    from kernels import _native

    num_out, num_in = w.shape
    check_tensor(op, "x", x, torch.float32, (None, num_in))
    rows = x.shape[0]
    result, stride = output_rows(op, out, (rows, num_out))
    _native.quantized_matmul(
        x.data_ptr(), rows, w.packed.data_ptr(), num_out, num_in, w.group_size, w.bits,
        w.scale_dtype.itemsize, w.has_minimum, 0 if w.order is None else w.order.data_ptr(), result.data_ptr(), stride,
    )  # fmt: skip
    return result
