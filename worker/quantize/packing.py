"""Codes packed as the compressed-tensors library packs them (its format `pack-quantized`), and read back.

An int32 holds 32 / bits neighbouring codes, the first in the lowest bits, each plus 2^(bits - 1) so that it's not negative. Weights are packed
along their rows, zero points along their columns.
"""

import torch

from worker.quantize.rounding import Precision, Quantized


def num_packed(count: int, bits: int) -> int:
    """How many int32 hold as many codes."""
    return -(-count * bits // 32)


def packed_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] -> int32 [N, ceil(K / (32 / bits))], padded with zero bits."""
    per_word = 32 // bits
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    missing = -codes.shape[1] % per_word
    if missing:
        unsigned = torch.nn.functional.pad(unsigned, (0, missing))
    if bits == 8:
        return unsigned.contiguous().view(torch.int32)
    halves = unsigned.view(len(codes), -1, 2)
    return (halves[..., 0] | halves[..., 1] << 4).contiguous().view(torch.int32)


def unpacked_rows(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [N, words] -> int8 [N, count]."""
    raw = packed.contiguous().view(torch.uint8)
    if bits == 4:
        raw = torch.stack([raw & 15, raw >> 4], dim=2).flatten(1)
    return (raw[:, :count].to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def packed_parts(rows: Quantized, precision: Precision) -> dict[str, torch.Tensor]:
    """Rows as they lie in the file, by the ending of the tensor's name; the number of rows is a multiple of 32 / bits, or the matrix ends with them."""
    parts = {"weight_packed": packed_rows(rows.codes, precision.bits), "weight_scale": rows.scale}
    if rows.zero is not None:
        parts["weight_zero_point"] = packed_rows(rows.zero.t().contiguous(), precision.bits).t().contiguous()
    return parts


def unpacked_parts(parts: dict[str, torch.Tensor], precision: Precision) -> Quantized:
    """The inverse, of a whole matrix with its `weight_shape`."""
    num_rows, num_columns = parts["weight_shape"].tolist()
    zero = None
    if not precision.is_symmetric:
        zero = unpacked_rows(parts["weight_zero_point"].t(), precision.bits, num_rows).t().contiguous()
    return Quantized(unpacked_rows(parts["weight_packed"], precision.bits, num_columns), parts["weight_scale"], zero)
