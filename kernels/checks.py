"""Argument checks that ops share: each raises KernelError naming op and argument."""

import torch

from kernels.errors import KernelError


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """A contiguous CPU tensor of this dtype and shape; None stands for any size."""
    if not tensor.is_cpu:
        raise KernelError(f"{op}: {name} must be on the CPU, got {tensor.device}")
    if tensor.dtype is not dtype:
        raise KernelError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(w is not None and w != a for w, a in zip(shape, actual, strict=True)):
        wanted = ["?" if size is None else size for size in shape]
        raise KernelError(f"{op}: {name} must have shape {wanted}, got {list(actual)}")
    if not tensor.is_contiguous():
        raise KernelError(f"{op}: {name} must be contiguous")


def sizes(op: str, name: str, tensor: torch.Tensor, num_dims: int) -> torch.Size:
    """The shape of a tensor that must have so many dimensions."""
    if tensor.ndim != num_dims:
        raise KernelError(f"{op}: {name} must have {num_dims} dimensions, got {list(tensor.shape)}")
    return tensor.shape


def output(op: str, out: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """`out` after a check, or a new float32 tensor."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32)
    check_tensor(op, "out", out, torch.float32, shape)
    return out
