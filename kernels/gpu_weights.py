"""Matrices as they lie in a GPU's memory: laid out once at load in the order in which the Triton kernels read them.

Rows and columns are padded with zeros to whole tiles, so that no load of a weight needs a mask. A quantized matrix is cut into chunks of
columns; within a chunk, the 32 (with groups of 16: 16) neighbouring 16-bit words of a row hold one column each in every bit position:
four planes of 4 bits or two of 8. A chunk's rows are adjacent, so that a tile of weights is one run of memory and each thread takes 16
bytes of it. See `docs/gpu.md` for the picture.
"""

from dataclasses import dataclass

import torch

ROW_ALIGNMENT = 128
DENSE_COLUMNS = 64
PLANE_WIDTH = 32
FP8_GROUP = 128  # columns that share a scale


@dataclass(frozen=True, slots=True)
class GpuQuantizedWeight:
    """W[n, k] = (code[n, k] * scale[n, k // g] + minimum[n, k // g]) * unit, scale and minimum in float16.

    `unit` is a power of two that brings the largest magnitude to about 2^12, far from both ends of float16. `order` is that of `kernels.weights`.
    """

    codes: torch.Tensor  # int16 [chunks, padded rows, plane width]
    scales: torch.Tensor  # [groups, padded rows], int32 (scale below, minimum above) or float16 (scale alone)
    shape: tuple[int, int]
    group_size: int
    has_minimum: bool
    unit: float
    order: torch.Tensor | None = None  # int32 [K]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class GpuInt4Weight(GpuQuantizedWeight):
    """4-bit codes 0..15."""

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4


@dataclass(frozen=True, slots=True)
class GpuInt8Weight(GpuQuantizedWeight):
    """8-bit codes, stored + 128."""

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8


@dataclass(frozen=True, slots=True)
class GpuDenseWeight:
    """W = matrix * unit; float16 for matrices that came with 16 bits (a bfloat16 loses nothing above 2^-28 of the largest), or float32."""

    matrix: torch.Tensor  # [padded rows, padded columns]
    shape: tuple[int, int]
    unit: float

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.matrix.nbytes


@dataclass(frozen=True, slots=True)
class GpuFp8Weight:
    """8-bit floats (e4m3) with a float32 scale per row and group of 128 columns."""

    codes: torch.Tensor  # uint8 [padded rows, padded columns]
    scales: torch.Tensor  # float32 [groups, padded rows]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.codes.nbytes + self.scales.nbytes


GpuWeight = GpuInt4Weight | GpuInt8Weight | GpuFp8Weight | GpuDenseWeight
