"""Putting matrices where a backend reads them: as they are for CPUs, laid out anew and moved for GPUs."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from kernels.backend import Backend, device_of
from kernels.gpu_weights import (
    DENSE_COLUMNS,
    FP8_GROUP,
    PLANE_WIDTH,
    ROW_ALIGNMENT,
    GpuDenseWeight,
    GpuFp8Weight,
    GpuInt4Weight,
    GpuInt8Weight,
    GpuWeight,
)
from kernels.packing import PANEL_ROWS
from kernels.weights import AnyWeight, DenseWeight, Fp8Weight, Quantized, Weight, _split

_ROWS_AT_ONCE = 4096  # bounds what is unpacked at any time
_LARGEST = 13  # magnitudes end below 2^13

Packed = TypeVar("Packed", bound=Weight)


def place(weight: AnyWeight, backend: Backend) -> AnyWeight:
    """The matrix as this backend's kernels read it; for CPU and reference that's the one given."""
    if backend is not Backend.GPU or isinstance(weight, GpuWeight):
        return weight
    device = device_of(backend)
    if isinstance(weight, Fp8Weight):
        return _fp8(weight, device)
    return _dense(weight, device) if isinstance(weight, DenseWeight) else _quantized(weight, device)


def _quantized(weight: Quantized, device: torch.device) -> GpuWeight:
    num_out, num_in = weight.shape
    width = min(weight.group_size, PLANE_WIDTH)
    planes = 16 // weight.bits
    chunks = -(-num_in // (width * planes))
    padded = -(-num_out // ROW_ALIGNMENT) * ROW_ALIGNMENT
    groups = -(-chunks * width * planes // weight.group_size)
    exponent = _exponent(max(_largest(part) for _, part in _parts(weight, device)))
    codes = torch.zeros(chunks, padded, width, dtype=torch.int16, device=device)
    scales = torch.zeros(groups, padded, 2, dtype=torch.float16, device=device)
    for here, part in _parts(weight, device):
        codes[:, here] = _words(part, chunks, planes, width)
        for side, numbers in enumerate(_split(part, part.packed)):
            if numbers is not None:
                flat = numbers.flatten(0, 1).squeeze(-1)[: part.shape[0]]
                scales[: flat.shape[1], here, side] = (flat * 2.0**exponent).half().T
    order = None if weight.order is None else weight.order.to(device)
    kind = GpuInt4Weight if weight.bits == 4 else GpuInt8Weight
    pairs = scales.view(torch.int32).squeeze(-1) if weight.has_minimum else scales[:, :, 0].contiguous()
    return kind(codes, pairs, weight.shape, weight.group_size, weight.has_minimum, 2.0**-exponent, order)


def _fp8(weight: Fp8Weight, device: torch.device) -> GpuFp8Weight:
    num_out, num_in = weight.shape
    padded = -(-num_out // ROW_ALIGNMENT) * ROW_ALIGNMENT
    codes = torch.zeros(padded, -(-num_in // FP8_GROUP) * FP8_GROUP, dtype=torch.uint8, device=device)
    scales = torch.zeros(weight.scales.shape[1], padded, dtype=torch.float32, device=device)
    for here, part in _parts(weight, device):
        codes[here, :num_in] = part.codes.permute(0, 2, 1).reshape(-1, num_in)[: part.shape[0]]
        scales[:, here] = part.scales.permute(1, 0, 2).reshape(len(scales), -1)[:, : part.shape[0]]
    return GpuFp8Weight(codes, scales, weight.shape)


def _dense(weight: DenseWeight, device: torch.device) -> GpuDenseWeight:
    num_out, num_in = weight.shape
    is_narrow = weight.packed.dtype is not torch.float32
    ends = [part.packed.aminmax() for _, part in _parts(weight, device)] if is_narrow and weight.packed.numel() else []
    exponent = _exponent(max((max(-float(end.min), float(end.max)) for end in ends), default=0.0))
    matrix = torch.zeros(
        -(-num_out // ROW_ALIGNMENT) * ROW_ALIGNMENT,
        -(-num_in // DENSE_COLUMNS) * DENSE_COLUMNS,
        dtype=torch.float16 if is_narrow else torch.float32,
        device=device,
    )
    for here, part in _parts(weight, device):
        matrix[here, :num_in] = (part.dequantize() * 2.0**exponent).to(matrix.dtype)
    return GpuDenseWeight(matrix, weight.shape, 2.0**-exponent)


def _parts(weight: Packed, device: torch.device) -> Iterator[tuple[slice, Packed]]:
    """A matrix a few rows at a time, on the device, where they are laid out anew: which rows, and a matrix of them alone."""
    num_out, num_in = weight.shape
    for first in range(0, num_out, _ROWS_AT_ONCE):  # each begins at a panel
        last = min(first + _ROWS_AT_ONCE, num_out)
        panels = weight.packed[first // PANEL_ROWS : -(-last // PANEL_ROWS)]
        yield slice(first, last), replace(weight, packed=panels.to(device), shape=(last - first, num_in))


def _words(part: Quantized, chunks: int, planes: int, width: int) -> torch.Tensor:
    """int16 [chunks, rows, width] with a code of each plane."""
    num_rows = part.shape[0]
    codes = part._codes(part.packed).flatten(0, 1)[:num_rows].reshape(num_rows, -1)
    if part.bits == 8:
        codes = codes.view(torch.uint8) ^ 0x80
    missing = chunks * planes * width - codes.shape[1]
    columns = torch.nn.functional.pad(codes, (0, missing)).view(num_rows, chunks, planes, width)
    words = columns[:, :, 0].int()
    for plane in range(1, planes):
        words |= columns[:, :, plane].int() << (plane * part.bits)
    return words.to(torch.int16).permute(1, 0, 2)


def _largest(part: Quantized) -> float:
    """A bound on the magnitudes of weights, scales and minima."""
    scale, minimum = _split(part, part.packed)
    low, high = (0, 15) if part.bits == 4 else (-128, 127)
    lowest = torch.zeros_like(scale) if minimum is None else minimum
    ends = [scale, lowest, scale * low + lowest, scale * high + lowest]
    return max(float(end.abs().max()) for end in ends)


def _exponent(largest: float) -> int:
    """The power of two that brings `largest` to [2^12, 2^13)."""
    return _LARGEST - math.frexp(largest)[1] if largest > 0 else 0
