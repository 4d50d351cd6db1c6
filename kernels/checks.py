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


def check_rows(op: str, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> int:
    """A float32 CPU tensor of this shape, each row contiguous; returns how many elements lie from a row's beginning to the next one's."""
    if tensor.ndim and len(tensor) and not tensor.is_contiguous():
        check_tensor(op, name, tensor[0], torch.float32, shape[1:])
        if len(shape) != tensor.ndim or (shape[0] is not None and shape[0] != len(tensor)):
            raise KernelError(f"{op}: {name} must have {shape[0]} rows, got {list(tensor.shape)}")
        return tensor.stride(0)
    check_tensor(op, name, tensor, torch.float32, shape)
    return tensor[0].numel() if len(tensor) else 0


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


def output_rows(op: str, out: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The same, but rows of `out` may be part of longer ones; also returns how far apart they begin."""
    result = torch.empty(shape, dtype=torch.float32) if out is None else out
    return result, check_rows(op, "out", result, shape)
