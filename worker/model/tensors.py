"""A tensor on its way from a file to a kernel: still in rows, so that rows can be permuted and stacked before packing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.errors import KernelError
from kernels.weights import DenseWeight, Int4Weight, Int8Weight, Weight
from worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """W[n, k] = codes[n, k] * scale[n, k // group_size] + minimum[n, k // group_size]; uint8 codes are 4-bit, int8 ones 8-bit."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return tuple(self.codes.shape)


Rows = QuantizedRows | torch.Tensor  # a tensor is an unquantized matrix


def permuted(rows: Rows, order: torch.Tensor) -> Rows:
    """Rows in another order."""
    if isinstance(rows, torch.Tensor):
        return rows[order]
    minimum = None if rows.minimum is None else rows.minimum[order]
    return QuantizedRows(rows.codes[order], rows.scale[order], minimum, rows.group_size)


def can_stack(parts: Sequence[Rows]) -> bool:
    """Whether the parts have one format, so that they can be one matrix."""
    return len({_format(part) for part in parts}) == 1


def stacked(parts: Sequence[Rows]) -> Rows:
    """The parts' rows one below the other."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    quantized = [part for part in parts if isinstance(part, QuantizedRows)]
    minima = [part.minimum for part in quantized if part.minimum is not None]
    return QuantizedRows(
        torch.cat([part.codes for part in quantized]),
        torch.cat([part.scale for part in quantized]),
        torch.cat(minima) if minima else None,
        first.group_size,
    )


def is_finite(rows: Rows) -> bool:
    """Whether no value is NaN or infinite."""
    numbers = (rows,) if isinstance(rows, torch.Tensor) else (rows.scale, rows.minimum)
    return all(bool(torch.isfinite(tensor).all()) for tensor in numbers if tensor is not None)


def packed(rows: Rows, source: str) -> Weight:
    """The matrix as kernels read it. Raises ModelError if its format can't be used; `source` names file and tensor."""
    try:
        if isinstance(rows, torch.Tensor):
            return DenseWeight.from_matrix(rows)
        if rows.codes.dtype is torch.uint8:
            minimum = torch.zeros_like(rows.scale) if rows.minimum is None else rows.minimum
            return Int4Weight.from_codes(rows.codes, rows.scale, minimum, rows.group_size)
        return Int8Weight.from_codes(rows.codes, rows.scale, rows.minimum, rows.group_size)
    except KernelError as error:
        raise ModelError(f"{source}: {error}") from None


def _format(rows: Rows) -> tuple[object, ...]:
    if isinstance(rows, torch.Tensor):
        return (rows.dtype,)
    return (rows.codes.dtype, rows.scale.dtype, rows.minimum is None, rows.group_size)
