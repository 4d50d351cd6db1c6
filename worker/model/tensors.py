"""A tensor on its way from a file to a kernel: still in rows, so that rows can be permuted and stacked before packing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.gpu_weights import FP8_GROUP
from kernels.huge_pages import WeightMemory
from kernels.packing import PANEL_ROWS, all_finite, elements_shape, quantized_shape
from kernels.placement import place
from kernels.weights import AnyWeight, DenseWeight, Fp8Weight, Int4Weight, Int8Weight, Weight
from worker.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """W[n, order[k]] = codes[n, k] * scale[n, k // group_size] + minimum[n, k // group_size].

    Codes are uint8 [N, K / 2], two 4-bit ones a byte with the lower column in the lower half, or int8 [N, K]. `order` is int32 [K]; where
    it's None, columns lie as they are multiplied.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None
    group_size: int
    order: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """W[n, k] = codes[n, k] * scale[n, k // 128]; codes e4m3 [N, K], scale float32."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return tuple(self.codes.shape)


Rows = QuantizedRows | Fp8Rows | torch.Tensor  # a tensor is an unquantized matrix


def permuted(rows: Rows, order: torch.Tensor) -> Rows:
    """Rows in another order."""
    if isinstance(rows, torch.Tensor):
        return rows[order]
    if isinstance(rows, Fp8Rows):
        return Fp8Rows(rows.codes.view(torch.uint8)[order].view(rows.codes.dtype), rows.scale[order])
    minimum = None if rows.minimum is None else rows.minimum[order]
    return QuantizedRows(rows.codes[order], rows.scale[order], minimum, rows.group_size, rows.order)


def can_stack(parts: Sequence[Rows]) -> bool:
    """Whether the parts have one format, so that they can be one matrix."""
    return len({_format(part) for part in parts}) == 1


def stacked(parts: Sequence[Rows]) -> Rows:
    """The parts' rows one below the other."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    if isinstance(first, Fp8Rows):
        floats = [part for part in parts if isinstance(part, Fp8Rows)]
        codes = torch.cat([part.codes.view(torch.uint8) for part in floats]).view(first.codes.dtype)
        return Fp8Rows(codes, torch.cat([part.scale for part in floats]))
    quantized = [part for part in parts if isinstance(part, QuantizedRows)]
    minima = [part.minimum for part in quantized if part.minimum is not None]
    return QuantizedRows(
        torch.cat([part.codes for part in quantized]),
        torch.cat([part.scale for part in quantized]),
        torch.cat(minima) if minima else None,
        first.group_size,
        first.order,
    )


def dequantized(rows: Rows, first: int, last: int) -> torch.Tensor:
    """Rows [first, last) as float32, exact up to its rounding."""
    if isinstance(rows, torch.Tensor):
        return rows[first:last].float()
    columns = rows.shape[1]
    if isinstance(rows, Fp8Rows):
        return rows.codes[first:last].float() * rows.scale[first:last].repeat_interleave(FP8_GROUP, 1)[:, :columns]
    codes = unpaired(rows.codes[first:last]) if rows.bits == 4 else rows.codes[first:last]
    values = codes.float() * rows.scale[first:last].float().repeat_interleave(rows.group_size, 1)
    if rows.minimum is not None:
        values += rows.minimum[first:last].float().repeat_interleave(rows.group_size, 1)
    if rows.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, rows.order.long(), values)


def paired(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes uint8 [N, K] as two a byte, [N, K / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpaired(pairs: torch.Tensor) -> torch.Tensor:
    """The inverse of `paired`."""
    return torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)


def nbytes(rows: Rows) -> int:
    """Bytes of all numbers."""
    if isinstance(rows, torch.Tensor):
        return rows.nbytes
    minimum = None if isinstance(rows, Fp8Rows) else rows.minimum
    return rows.codes.nbytes + rows.scale.nbytes + (0 if minimum is None else minimum.nbytes)


def is_finite(rows: Rows) -> bool:
    """Whether no value is NaN or infinite."""
    if isinstance(rows, Fp8Rows):
        return all_finite(rows.codes) and all_finite(rows.scale)
    numbers = (rows,) if isinstance(rows, torch.Tensor) else (rows.scale, rows.minimum)
    return all(all_finite(tensor) for tensor in numbers if tensor is not None)


def packed(rows: Rows, source: str, memory: WeightMemory | None = None) -> Weight:
    """The matrix as a CPU's kernels read it, in this memory. Raises ModelError if its format can't be used; `source` names file and tensor."""
    return packed_together([rows], source, memory)


def packed_together(parts: Sequence[Rows], source: str, memory: WeightMemory | None = None) -> Weight:
    """The parts' rows one below the other as one matrix; they have one format. See `packed`."""
    if any(part.shape[0] % PANEL_ROWS for part in parts[:-1]):
        parts = [stacked(parts)]
    num_rows, num_columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    try:
        shape, dtype = _layout(parts[0], (num_rows, num_columns))
        whole = memory.empty(shape, dtype) if memory else torch.empty(shape, dtype=dtype)
        first, weights = 0, []
        for part in parts:
            end = first + -(-part.shape[0] // PANEL_ROWS)
            weights.append(_packed(part, whole[first:end]))
            first = end
    except KernelError as error:
        raise ModelError(f"{source}: {error}") from None
    return replace(weights[0], packed=whole, shape=(num_rows, num_columns))


def _layout(rows: Rows, shape: tuple[int, int]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a packed matrix [N, K] in the format of some rows."""
    if isinstance(rows, torch.Tensor):
        return elements_shape(shape), rows.dtype
    if isinstance(rows, Fp8Rows):
        return Fp8Weight.packed_shape(shape), torch.uint8
    has_minimum = rows.bits == 4 or rows.minimum is not None
    size = quantized_shape(shape, rows.group_size, rows.bits, rows.scale.dtype, has_minimum=has_minimum)
    return size, torch.uint8


def _packed(rows: Rows, out: torch.Tensor) -> Weight:
    if isinstance(rows, torch.Tensor):
        return DenseWeight.from_matrix(rows, out)
    if isinstance(rows, Fp8Rows):
        return Fp8Weight.from_codes(rows.codes, rows.scale, out)
    if rows.bits == 4:
        minimum = torch.zeros_like(rows.scale) if rows.minimum is None else rows.minimum
        return Int4Weight.from_pairs(rows.codes, rows.scale, minimum, rows.group_size, rows.order, out)
    return Int8Weight.from_codes(rows.codes, rows.scale, rows.minimum, rows.group_size, rows.order, out)


def placed(parts: Sequence[Rows], source: str, backend: Backend, memory: WeightMemory) -> AnyWeight:
    """The same where this backend's kernels read it. For a GPU that's not `memory`: what a matrix was made of is free again when this returns."""
    return place(packed_together(parts, source, None if backend is Backend.GPU else memory), backend)


def _format(rows: Rows) -> tuple[object, ...]:
    if isinstance(rows, torch.Tensor):
        return (rows.dtype,)
    if isinstance(rows, Fp8Rows):
        return (rows.codes.dtype,)
    order = None if rows.order is None else rows.order.numpy().tobytes()
    return (rows.codes.dtype, rows.scale.dtype, rows.minimum is None, rows.group_size, order)
