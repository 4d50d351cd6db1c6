"""Matrices as they lie in memory: packed once at load in the order in which the kernels read them.

All are [out_features, in_features], used as y = x @ W.T. A quantized one is W[n, k] = code[n, k] * scale[n, k // g] +
minimum[n, k // g], in panels of 16 rows: for each panel and group the codes, then 16 scales, then 16 minima (if there are any).
Nothing is expanded: 4-bit codes take 4 bits, scales keep the precision that they came with.
"""

from dataclasses import dataclass

import torch

from kernels.errors import KernelError
from kernels.gpu_weights import GpuWeight

PANEL_ROWS = 16
_QUAD = 4  # neighbouring columns that share a 32-bit lane


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """4-bit codes 0..15 with a scale and a minimum per group of 32, 64 or 128 columns."""

    packed: torch.Tensor  # uint8 [panels, groups, bytes]
    shape: tuple[int, int]
    group_size: int
    scale_dtype: torch.dtype

    bits = 4
    has_minimum = True

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, group_size: int
    ) -> "Int4Weight":
        """Pack codes uint8 [N, K] (0..15) with scale and minimum [N, K / group_size], float16 or float32."""
        _check_codes("Int4Weight", codes, torch.uint8, group_size, {32, 64, 128})
        _check_scales("Int4Weight", codes, scale, minimum, group_size)
        if codes.numel() and int(codes.max()) > 15:
            raise KernelError("Int4Weight: codes must be 0..15")
        grouped = _panels(codes).view(-1, PANEL_ROWS, codes.shape[1] // group_size, group_size // 8, 2, _QUAD)
        pairs = grouped.permute(4, 0, 2, 3, 1, 5)  # [low/high, panel, group, vector, row, column]
        vectors = pairs[0] | (pairs[1] << 4)
        packed = torch.cat([vectors.flatten(2), _scale_bytes(scale), _scale_bytes(minimum)], dim=2)
        return cls(packed.contiguous(), _shape(codes), group_size, scale.dtype)

    def _codes(self, panels: torch.Tensor) -> torch.Tensor:
        vectors = panels[:, :, : self.group_size * PANEL_ROWS // 2]
        vectors = vectors.view(*panels.shape[:2], self.group_size // 8, PANEL_ROWS, _QUAD)
        both = torch.stack([vectors & 15, vectors >> 4], dim=3)  # [panel, group, vector, low/high, row, column]
        return both.permute(0, 4, 1, 2, 3, 5).flatten(3)

    def _row_codes(self, panel: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        every = self.packed[:, :, : self.group_size * PANEL_ROWS // 2]
        every = every.view(*every.shape[:2], self.group_size // 8, PANEL_ROWS, _QUAD)
        vectors = every[panel, :, :, row]  # [rows, group, vector, column]
        return torch.stack([vectors & 15, vectors >> 4], dim=3).flatten(1)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.packed.nbytes

    def dequantize(self, rows: slice | None = None) -> torch.Tensor:
        """float32 [rows, K], exact up to float32 rounding."""
        return _dequantize(self, rows)

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [len(ids), K]: some rows, dequantized."""
        return _gather(self, ids)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Signed 8-bit codes with a scale, and optionally a minimum, per group of 16, 32, 64 or 128 columns."""

    packed: torch.Tensor  # uint8 [panels, groups, bytes]; codes are stored + 128
    shape: tuple[int, int]
    group_size: int
    scale_dtype: torch.dtype
    has_minimum: bool

    bits = 8

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group_size: int
    ) -> "Int8Weight":
        """Pack codes int8 [N, K] with scale (and minimum) [N, K / group_size], float16 or float32."""
        _check_codes("Int8Weight", codes, torch.int8, group_size, {16, 32, 64, 128})
        _check_scales("Int8Weight", codes, scale, minimum, group_size)
        unsigned = _panels(codes.view(torch.uint8) ^ 0x80)
        grouped = unsigned.view(-1, PANEL_ROWS, codes.shape[1] // group_size, group_size // _QUAD, _QUAD)
        parts = [grouped.permute(0, 2, 3, 1, 4).flatten(2), _scale_bytes(scale)]
        if minimum is not None:
            parts.append(_scale_bytes(minimum))
        packed = torch.cat(parts, dim=2)
        return cls(packed.contiguous(), _shape(codes), group_size, scale.dtype, minimum is not None)

    def _codes(self, panels: torch.Tensor) -> torch.Tensor:
        vectors = panels[:, :, : self.group_size * PANEL_ROWS]
        vectors = vectors.view(*panels.shape[:2], self.group_size // _QUAD, PANEL_ROWS, _QUAD)
        return (vectors.permute(0, 3, 1, 2, 4).flatten(3) ^ 0x80).view(torch.int8)

    def _row_codes(self, panel: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        every = self.packed[:, :, : self.group_size * PANEL_ROWS]
        every = every.view(*every.shape[:2], self.group_size // _QUAD, PANEL_ROWS, _QUAD)
        return (every[panel, :, :, row].flatten(1) ^ 0x80).view(torch.int8)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.packed.nbytes

    def dequantize(self, rows: slice | None = None) -> torch.Tensor:
        """float32 [rows, K], exact up to float32 rounding."""
        return _dequantize(self, rows)

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [len(ids), K]: some rows, dequantized."""
        return _gather(self, ids)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Unquantized bfloat16, float16 or float32, in panels [panels, K, 16]."""

    packed: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor) -> "DenseWeight":
        """Pack a matrix [N, K]."""
        if matrix.ndim != 2 or matrix.dtype not in {torch.bfloat16, torch.float16, torch.float32}:
            raise KernelError(
                f"DenseWeight: expected a bf16, f16 or f32 matrix, got {matrix.dtype} {list(matrix.shape)}"
            )
        packed = _panels(matrix).view(-1, PANEL_ROWS, matrix.shape[1]).permute(0, 2, 1)
        return cls(packed.contiguous(), _shape(matrix))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.packed.nbytes

    def dequantize(self, rows: slice | None = None) -> torch.Tensor:
        """float32 [rows, K], exact."""
        first, last, _ = (rows or slice(None)).indices(self.shape[0])
        panels = self.packed[first // PANEL_ROWS : -(-last // PANEL_ROWS)].permute(0, 2, 1)
        offset = first // PANEL_ROWS * PANEL_ROWS
        return panels.reshape(-1, self.shape[1])[first - offset : last - offset].float()

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [len(ids), K]: some rows."""
        return self.packed[ids // PANEL_ROWS, :, ids % PANEL_ROWS].float()


Quantized = Int4Weight | Int8Weight
Weight = Int4Weight | Int8Weight | DenseWeight
AnyWeight = Weight | GpuWeight  # placed for whichever backend


def _shape(matrix: torch.Tensor) -> tuple[int, int]:
    return int(matrix.shape[0]), int(matrix.shape[1])


def _panels(matrix: torch.Tensor) -> torch.Tensor:
    """Rows padded with zeros to whole panels."""
    missing = -matrix.shape[0] % PANEL_ROWS
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix.contiguous()


def _scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    by_panel = _panels(scale).view(-1, PANEL_ROWS, scale.shape[1]).permute(0, 2, 1).contiguous()
    return by_panel.view(torch.uint8)  # [panels, groups, 16 * scale bytes]


def _split(weight: Quantized, panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and minimum of some panels, float32 [panels, rows, groups, 1]."""
    start = weight.group_size * PANEL_ROWS * weight.bits // 8
    size = PANEL_ROWS * weight.scale_dtype.itemsize

    def numbers(first: int) -> torch.Tensor:
        raw = panels[:, :, first : first + size].contiguous().view(weight.scale_dtype)
        return raw.float().permute(0, 2, 1).unsqueeze(-1)

    return numbers(start), numbers(start + size) if weight.has_minimum else None


def _expand(weight: Quantized, panels: torch.Tensor) -> torch.Tensor:
    """float32 [panels, 16, K] of some panels."""
    scale, minimum = _split(weight, panels)
    values = weight._codes(panels).float() * scale
    if minimum is not None:
        values += minimum
    return values.flatten(2)


def _dequantize(weight: Quantized, rows: slice | None) -> torch.Tensor:
    first, last, _ = (rows or slice(None)).indices(weight.shape[0])
    panels = _expand(weight, weight.packed[first // PANEL_ROWS : -(-last // PANEL_ROWS)])
    offset = first // PANEL_ROWS * PANEL_ROWS
    return panels.reshape(-1, weight.shape[1])[first - offset : last - offset]


def _gather(weight: Quantized, ids: torch.Tensor) -> torch.Tensor:
    panel, row = ids // PANEL_ROWS, ids % PANEL_ROWS
    start = weight.group_size * PANEL_ROWS * weight.bits // 8
    size = PANEL_ROWS * weight.scale_dtype.itemsize

    def numbers(first: int) -> torch.Tensor:
        every = weight.packed[:, :, first : first + size].view(weight.scale_dtype)
        return every[panel, :, row].float().unsqueeze(-1)  # [ids, groups, 1]

    num_groups = weight.shape[1] // weight.group_size
    codes = weight._row_codes(panel, row).view(len(ids), num_groups, weight.group_size)
    values = codes.float() * numbers(start)
    if weight.has_minimum:
        values += numbers(start + size)
    return values.flatten(1)


def _check_codes(name: str, codes: torch.Tensor, dtype: torch.dtype, group: int, allowed: set[int]) -> None:
    if codes.ndim != 2 or codes.dtype is not dtype:
        raise KernelError(f"{name}: codes must be a {dtype} matrix, got {codes.dtype} {list(codes.shape)}")
    if group not in allowed:
        raise KernelError(f"{name}: group_size must be one of {sorted(allowed)}, got {group}")
    if codes.shape[1] % group or not codes.shape[1]:
        raise KernelError(f"{name}: in_features {codes.shape[1]} must be a multiple of group_size {group}")


def _check_scales(
    name: str, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group: int
) -> None:
    wanted = (codes.shape[0], codes.shape[1] // group)
    for label, tensor in (("scale", scale), ("minimum", minimum)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != wanted or tensor.dtype is not scale.dtype:
            raise KernelError(
                f"{name}: {label} must be {list(wanted)} {scale.dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise KernelError(f"{name}: {label} has values that are not finite")
    if scale.dtype not in {torch.float16, torch.float32}:
        raise KernelError(f"{name}: scale must be float16 or float32, got {scale.dtype}")
