"""Look-up of embedding rows."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output
from kernels.dense_matmul import NATIVE_TYPES
from kernels.embedding.ref import embedding_ref
from kernels.errors import KernelError
from kernels.gpu_weights import GpuWeight
from kernels.weights import AnyWeight, DenseWeight, Fp8Weight


def embedding(
    ids: torch.Tensor, w: AnyWeight, out: torch.Tensor | None = None, *, factor: float = 1.0, backend: Backend
) -> torch.Tensor:
    """ids int64 [T] -> float32 [T, K], rows of W times `factor`, in `out` if given. Raises KernelError for an id outside W."""
    is_placed = isinstance(w, GpuWeight)
    if is_placed is not (backend is Backend.GPU):
        raise KernelError(f"embedding: w is not laid out for {backend}, got {type(w).__name__}")
    check_tensor("embedding", "ids", ids, torch.int64, (None,), backend)
    if is_placed and getattr(w, "order", None) is not None:
        raise KernelError("embedding: w has an order of columns, which only products take on a GPU")
    # A look at a GPU's numbers would wait for it: there such an id gives NaN.
    if len(ids) and backend is not Backend.GPU:
        numbers = ids.numpy()
        if not 0 <= numbers.min() <= numbers.max() < w.shape[0]:
            raise KernelError(f"embedding: ids must be in [0, {w.shape[0]})")
    num_out, num_in = w.shape
    result = output("embedding", out, (len(ids), num_in), backend)
    if isinstance(w, GpuWeight):
        if result.numel():
            from kernels.embedding.gpu import embedding_gpu

            embedding_gpu(ids, w, result)
            if factor != 1.0:
                result.mul_(factor)
        return result
    if backend is Backend.REF:
        return result.copy_(embedding_ref(ids, w) * factor)
    from kernels import _native

    if isinstance(w, DenseWeight):
        kind = NATIVE_TYPES[w.packed.dtype]
        _native.dense_rows(w.packed.data_ptr(), kind, num_in, ids.data_ptr(), len(ids), factor, result.data_ptr())
    elif isinstance(w, Fp8Weight):
        _native.fp8_rows(w.packed.data_ptr(), num_in, ids.data_ptr(), len(ids), factor, result.data_ptr())
    else:
        _native.quantized_rows(
            w.packed.data_ptr(), num_out, num_in, w.group_size, w.bits, w.scale_dtype.itemsize, w.has_minimum,
            0 if w.order is None else w.order.data_ptr(), ids.data_ptr(), len(ids), factor, result.data_ptr(),
        )  # fmt: skip
    return result
