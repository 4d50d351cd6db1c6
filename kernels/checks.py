"""Argument checks that ops share: each raises KernelError naming op and argument."""

import torch

from kernels.backend import Backend, device_of
from kernels.errors import KernelError


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    backend: Backend = Backend.CPU,
) -> None:
    """A contiguous tensor of this dtype and shape where the backend reads it; None stands for any size."""
    if not tensor.is_cpu or backend is Backend.GPU:
        _check_device(op, name, tensor, backend)
    if tensor.dtype is not dtype:
        raise KernelError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(w is not None and w != a for w, a in zip(shape, actual, strict=True)):
        wanted = ["?" if size is None else size for size in shape]
        raise KernelError(f"{op}: {name} must have shape {wanted}, got {list(actual)}")
    if not tensor.is_contiguous():
        raise KernelError(f"{op}: {name} must be contiguous")


def check_rows(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], backend: Backend = Backend.CPU
) -> int:
    """A float32 tensor of this shape where the backend reads it, each row contiguous; returns how many elements lie from a row's beginning to the next one's."""
    if tensor.ndim and len(tensor) and not tensor.is_contiguous():
        check_tensor(op, name, tensor[0], torch.float32, shape[1:], backend)
        if len(shape) != tensor.ndim or (shape[0] is not None and shape[0] != len(tensor)):
            raise KernelError(f"{op}: {name} must have {shape[0]} rows, got {list(tensor.shape)}")
        return tensor.stride(0)
    check_tensor(op, name, tensor, torch.float32, shape, backend)
    return tensor[0].numel() if len(tensor) else 0


def check_heads(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], backend: Backend = Backend.CPU
) -> tuple[int, int]:
    """A float32 tensor of this shape [rows, heads, D] where the backend reads it, each head contiguous; returns how many elements lie from a row's beginning to the next one's, and from a head's."""
    if tensor.is_contiguous() or not tensor.numel():
        check_tensor(op, name, tensor, torch.float32, shape, backend)
        return tensor.stride(0), tensor.stride(1)
    check_tensor(op, name, tensor[0, 0], torch.float32, shape[2:], backend)
    if any(wanted is not None and wanted != size for wanted, size in zip(shape, tensor.shape, strict=True)):
        raise KernelError(f"{op}: {name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.stride(0) < 0 or tensor.stride(1) < tensor.shape[2]:
        raise KernelError(f"{op}: heads of {name} overlap")
    return tensor.stride(0), tensor.stride(1)


def sizes(op: str, name: str, tensor: torch.Tensor, num_dims: int) -> torch.Size:
    """The shape of a tensor that must have so many dimensions."""
    if tensor.ndim != num_dims:
        raise KernelError(f"{op}: {name} must have {num_dims} dimensions, got {list(tensor.shape)}")
    return tensor.shape


def output(op: str, out: torch.Tensor | None, shape: tuple[int, ...], backend: Backend = Backend.CPU) -> torch.Tensor:
    """`out` after a check, or a new float32 tensor where the backend writes it."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=device_of(backend))
    check_tensor(op, "out", out, torch.float32, shape, backend)
    return out


def output_rows(
    op: str, out: torch.Tensor | None, shape: tuple[int, ...], backend: Backend = Backend.CPU
) -> tuple[torch.Tensor, int]:
    """The same, but rows of `out` may be part of longer ones; also returns how far apart they begin."""
    result = torch.empty(shape, dtype=torch.float32, device=device_of(backend)) if out is None else out
    return result, check_rows(op, "out", result, shape, backend)


def _check_device(op: str, name: str, tensor: torch.Tensor, backend: Backend) -> None:
    wanted = device_of(backend).type
    if tensor.device.type != wanted:
        place = "CPU" if wanted == "cpu" else "GPU"
        raise KernelError(f"{op}: {name} must be on the {place}, got {tensor.device}")
