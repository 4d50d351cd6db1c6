"""Matrices as they lie in memory: packed once at load in the order in which the kernels read them.

All are [out_features, in_features], used as y = x @ W.T. A quantized one is W[n, order[k]] = code[n, k] * scale[n, k // g] +
minimum[n, k // g], in panels of 16 rows: for each panel and group the codes, then 16 scales, then 16 minima (if there are any).
`order`, int32 [K], is there if the columns of a group are scattered over the matrix: the product gathers its input by it.
Nothing is expanded: 4-bit codes take 4 bits, scales keep the precision that they came with.
"""

from dataclasses import dataclass

import torch

from kernels.errors import KernelError
from kernels.gpu_weights import FP8_GROUP, GpuWeight
from kernels.packing import PANEL_ROWS, QUAD, all_finite, pack_elements, pack_int4, pack_int8


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """4-bit codes 0..15 with a scale and a minimum per group of 32, 64 or 128 columns."""

    packed: torch.Tensor  # uint8 [panels, groups, bytes]
    shape: tuple[int, int]
    group_size: int
    scale_dtype: torch.dtype
    order: torch.Tensor | None = None

    bits = 4
    has_minimum = True

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, group_size: int
    ) -> "Int4Weight":
        """Pack codes uint8 [N, K] (0..15) with scale and minimum [N, K / group_size], float16 or float32."""
        _check_codes("Int4Weight", codes, torch.uint8, group_size, {32, 64, 128})
        if codes.numel() and int(codes.max()) > 15:
            raise KernelError("Int4Weight: codes must be 0..15")
        return cls.from_pairs(codes[:, 0::2] | (codes[:, 1::2] << 4), scale, minimum, group_size)

    @classmethod
    def from_pairs(
        cls,
        pairs: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor,
        group_size: int,
        order: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> "Int4Weight":
        """The same from codes two a byte, uint8 [N, K / 2], the lower column in the lower half; packed into `out` if it's given."""
        _check_codes("Int4Weight", pairs, torch.uint8, group_size, {32, 64, 128}, columns_each=2)
        shape = (int(pairs.shape[0]), 2 * int(pairs.shape[1]))
        _check_scales("Int4Weight", shape, scale, minimum, group_size)
        _check_order("Int4Weight", order, shape[1])
        return cls(pack_int4(pairs, scale, minimum, group_size, out), shape, group_size, scale.dtype, order)

    def _codes(self, panels: torch.Tensor) -> torch.Tensor:
        vectors = panels[:, :, : self.group_size * PANEL_ROWS // 2]
        vectors = vectors.view(*panels.shape[:2], self.group_size // 8, PANEL_ROWS, QUAD)
        both = torch.stack([vectors & 15, vectors >> 4], dim=3)  # [panel, group, vector, low/high, row, column]
        return both.permute(0, 4, 1, 2, 3, 5).flatten(3)

    def _row_codes(self, panel: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        every = self.packed[:, :, : self.group_size * PANEL_ROWS // 2]
        every = every.view(*every.shape[:2], self.group_size // 8, PANEL_ROWS, QUAD)
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
    order: torch.Tensor | None = None

    bits = 8

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor | None,
        group_size: int,
        order: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> "Int8Weight":
        """Pack codes int8 [N, K] with scale (and minimum) [N, K / group_size], float16 or float32, into `out` if it's given."""
        _check_codes("Int8Weight", codes, torch.int8, group_size, {16, 32, 64, 128})
        _check_scales("Int8Weight", _shape(codes), scale, minimum, group_size)
        _check_order("Int8Weight", order, int(codes.shape[1]))
        packed = pack_int8(codes, scale, minimum, group_size, out)
        return cls(packed, _shape(codes), group_size, scale.dtype, minimum is not None, order)

    def _codes(self, panels: torch.Tensor) -> torch.Tensor:
        vectors = panels[:, :, : self.group_size * PANEL_ROWS]
        vectors = vectors.view(*panels.shape[:2], self.group_size // QUAD, PANEL_ROWS, QUAD)
        return (vectors.permute(0, 3, 1, 2, 4).flatten(3) ^ 0x80).view(torch.int8)

    def _row_codes(self, panel: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        every = self.packed[:, :, : self.group_size * PANEL_ROWS]
        every = every.view(*every.shape[:2], self.group_size // QUAD, PANEL_ROWS, QUAD)
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
class Fp8Weight:
    """8-bit floats (e4m3, no infinity) with a float32 scale per row and group of 128 columns, the last of which may be narrower."""

    packed: torch.Tensor  # uint8 [panels, bytes]: codes [K, 16], then scales float32 [groups, 16]
    shape: tuple[int, int]

    @classmethod
    def packed_shape(cls, shape: tuple[int, int]) -> tuple[int, int]:
        """Of the packed bytes of a matrix [N, K]."""
        return -(-shape[0] // PANEL_ROWS), PANEL_ROWS * (shape[1] + 4 * -(-shape[1] // FP8_GROUP))

    @classmethod
    def from_codes(cls, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> "Fp8Weight":
        """Pack codes float8_e4m3fn [N, K] with scale float32 [N, ceil(K / 128)], into `out` if it's given."""
        if codes.ndim != 2 or codes.dtype is not torch.float8_e4m3fn or not codes.shape[1]:
            raise KernelError(f"Fp8Weight: codes must be an e4m3 matrix, got {codes.dtype} {list(codes.shape)}")
        wanted = (codes.shape[0], -(-codes.shape[1] // FP8_GROUP))
        if tuple(scale.shape) != wanted or scale.dtype is not torch.float32:
            raise KernelError(f"Fp8Weight: scale must be {list(wanted)} float32, got {list(scale.shape)} {scale.dtype}")
        for label, numbers in (("codes", codes), ("scale", scale)):
            if not all_finite(numbers):
                raise KernelError(f"Fp8Weight: {label} has values that are not finite")
        parts = (pack_elements(codes.view(torch.uint8)), pack_elements(scale).view(torch.uint8))
        return cls(torch.cat([part.flatten(1) for part in parts], dim=1, out=out), _shape(codes))

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [panels, K, 16], part of what's packed."""
        return self.packed[:, : self.shape[1] * PANEL_ROWS].view(-1, self.shape[1], PANEL_ROWS)

    @property
    def scales(self) -> torch.Tensor:
        """float32 [panels, groups, 16], part of what's packed."""
        return self.packed[:, self.shape[1] * PANEL_ROWS :].view(torch.float32).view(len(self.packed), -1, PANEL_ROWS)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.packed.nbytes

    def dequantize(self, rows: slice | None = None) -> torch.Tensor:
        """float32 [rows, K], exact up to float32 rounding."""
        first, last, _ = (rows or slice(None)).indices(self.shape[0])
        return self.gather_rows(torch.arange(first, last))

    def gather_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [len(ids), K]: some rows, dequantized."""
        panel, row = ids // PANEL_ROWS, ids % PANEL_ROWS
        codes = self.codes[panel, :, row].view(torch.float8_e4m3fn).float()
        return codes * self.scales[panel, :, row].repeat_interleave(FP8_GROUP, dim=1)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Unquantized bfloat16, float16 or float32, in panels [panels, K, 16]."""

    packed: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor, out: torch.Tensor | None = None) -> "DenseWeight":
        """Pack a matrix [N, K], into `out` if it's given."""
        if matrix.ndim != 2 or matrix.dtype not in {torch.bfloat16, torch.float16, torch.float32}:
            raise KernelError(
                f"DenseWeight: expected a bf16, f16 or f32 matrix, got {matrix.dtype} {list(matrix.shape)}"
            )
        return cls(pack_elements(matrix, out), _shape(matrix))

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
Weight = Int4Weight | Int8Weight | Fp8Weight | DenseWeight
AnyWeight = Weight | GpuWeight  # placed for whichever backend


def _shape(matrix: torch.Tensor) -> tuple[int, int]:
    return int(matrix.shape[0]), int(matrix.shape[1])


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
    return _in_order(weight, panels.reshape(-1, weight.shape[1])[first - offset : last - offset])


def _in_order(weight: Quantized, values: torch.Tensor) -> torch.Tensor:
    """Columns where they belong, from the order in which they lie."""
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order.long(), values)


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
    return _in_order(weight, values.flatten(1))


def _check_codes(
    name: str, codes: torch.Tensor, dtype: torch.dtype, group: int, allowed: set[int], columns_each: int = 1
) -> None:
    if codes.ndim != 2 or codes.dtype is not dtype:
        raise KernelError(f"{name}: codes must be a {dtype} matrix, got {codes.dtype} {list(codes.shape)}")
    if group not in allowed:
        raise KernelError(f"{name}: group_size must be one of {sorted(allowed)}, got {group}")
    num_in = codes.shape[1] * columns_each
    if num_in % group or not num_in:
        raise KernelError(f"{name}: in_features {num_in} must be a multiple of group_size {group}")


def _check_scales(
    name: str, shape: tuple[int, int], scale: torch.Tensor, minimum: torch.Tensor | None, group: int
) -> None:
    wanted = (shape[0], shape[1] // group)
    for label, tensor in (("scale", scale), ("minimum", minimum)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != wanted or tensor.dtype is not scale.dtype:
            raise KernelError(
                f"{name}: {label} must be {list(wanted)} {scale.dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
        if not all_finite(tensor):
            raise KernelError(f"{name}: {label} has values that are not finite")
    if scale.dtype not in {torch.float16, torch.float32}:
        raise KernelError(f"{name}: scale must be float16 or float32, got {scale.dtype}")


def _check_order(name: str, order: torch.Tensor | None, num_in: int) -> None:
    if order is None:
        return
    if order.dtype is not torch.int32 or tuple(order.shape) != (num_in,) or not order.is_contiguous():
        raise KernelError(f"{name}: order must be int32 [{num_in}], got {order.dtype} {list(order.shape)}")
    if not torch.equal(order.sort().values, torch.arange(num_in, dtype=torch.int32)):
        raise KernelError(f"{name}: order must name each column once")
