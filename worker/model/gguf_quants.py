"""GGUF's quantized formats taken apart into codes, scales and minima, exactly.

Each function takes blocks as uint8 [N, blocks, block bytes] and returns codes [N, blocks, block elements] with scale and minimum
[N, blocks, groups]. Formats with 4-bit codes give uint8, two codes a byte with the lower element in the lower half, the others int8. The layouts are those of ggml's reference.
"""

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt
import torch

from worker.model.tensors import QuantizedRows

U8 = npt.NDArray[np.uint8]
Parts = tuple[npt.NDArray[np.generic], npt.NDArray[np.floating], npt.NDArray[np.floating] | None]
Integers = npt.NDArray[np.integer]


def _halves(blocks: U8, first: int, count: int = 1) -> npt.NDArray[np.float16]:
    return np.array(blocks[..., first : first + 2 * count], order="C").view(np.float16)


def _nibbles(blocks: U8, first: int) -> U8:
    """32 codes from 16 bytes: low nibbles, then high ones."""
    raw = blocks[..., first : first + 16]
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _pairs(raw: U8) -> U8:
    """Bytes whose low nibbles are the first half of the codes and the high ones the second -> neighbouring codes two a byte."""
    even, odd = raw[..., 0::2], raw[..., 1::2]
    return np.concatenate([(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=-1)


def _fifth_bits(blocks: U8, first: int) -> U8:
    """32 bits from 4 bytes."""
    return np.unpackbits(blocks[..., first : first + 4], axis=-1, bitorder="little")


def _q4_0(blocks: U8) -> Parts:
    scale = _halves(blocks, 0)
    return _pairs(blocks[..., 2:18]), scale, scale * np.float16(-8)


def _q4_1(blocks: U8) -> Parts:
    return _pairs(blocks[..., 4:20]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: U8) -> Parts:
    codes = _nibbles(blocks, 6) | _fifth_bits(blocks, 2) << 4
    return codes.astype(np.int8) - np.int8(16), _halves(blocks, 0), None


def _q5_1(blocks: U8) -> Parts:
    codes = _nibbles(blocks, 8) | _fifth_bits(blocks, 4) << 4
    return codes.astype(np.int8), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: U8) -> Parts:
    return np.array(blocks[..., 2:], order="C").view(np.int8), _halves(blocks, 0), None


def _six_bit_pairs(raw: U8) -> tuple[U8, U8]:
    """8 scales and 8 minima of 6 bits each, from 12 bytes."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    return scales, minima


def _scaled(blocks: U8, d_at: int, scales: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    return _halves(blocks, d_at).astype(np.float32) * scales.astype(np.float32)


def _interleaved(low: Integers, high: Integers) -> Integers:
    """[..., 4, 32] low and high halves of 64 elements each -> [..., 256]."""
    both = np.stack([low, high], axis=-2)
    return both.reshape(*both.shape[:-3], 256)


def _q4_k(blocks: U8) -> Parts:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    raw = blocks[..., 16:144].reshape(*blocks.shape[:-1], 4, 32)
    codes = _pairs(raw).reshape(*blocks.shape[:-1], 128)
    return codes, _scaled(blocks, 0, scales), -_scaled(blocks, 2, minima)


def _q5_k(blocks: U8) -> Parts:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    raw = blocks[..., 48:176].reshape(*blocks.shape[:-1], 4, 32)
    high = blocks[..., None, 16:48]  # bit j of byte i: element i of group j
    bits = np.stack([(high >> j) & 1 for j in range(8)], axis=-2).reshape(*blocks.shape[:-1], 4, 2, 32)
    low, top = raw & 15 | bits[..., 0, :] << 4, raw >> 4 | bits[..., 1, :] << 4
    return _interleaved(low, top).astype(np.int8), _scaled(blocks, 0, scales), -_scaled(blocks, 2, minima)


def _q6_k(blocks: U8) -> Parts:
    low = blocks[..., 0:128].reshape(*blocks.shape[:-1], 2, 2, 32)  # [half, 32-byte part, byte]
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    parts = [(low[..., j % 2, :] >> (0 if j < 2 else 4) & 15) | (high[..., 0, :] >> 2 * j & 3) << 4 for j in range(4)]
    codes = np.stack(parts, axis=-2).reshape(*blocks.shape[:-1], 256).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return codes, _scaled(blocks, 208, scales), None


def _two_bits(raw: U8) -> Integers:
    """256 codes of 2 bits from 64 bytes: in each half, bits 2j of byte i are element 32 j + i."""
    halves = raw.reshape(*raw.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)
    return (halves >> shifts & 3).reshape(*raw.shape[:-1], 256)


def _q2_k(blocks: U8) -> Parts:
    scales = blocks[..., 0:16]
    codes = _two_bits(blocks[..., 16:80]).astype(np.int8)
    return codes, _scaled(blocks, 80, scales & 15), -_scaled(blocks, 82, scales >> 4)


def _q3_k(blocks: U8) -> Parts:
    mask = blocks[..., 0:32]  # bit j of byte i: element 32 j + i has its third bit set
    bits = np.stack([(mask >> j) & 1 for j in range(8)], axis=-2).reshape(*blocks.shape[:-1], 256)
    codes = (_two_bits(blocks[..., 32:96]) | bits << 2).astype(np.int8) - np.int8(4)
    raw = blocks[..., 96:108]
    low, high = raw[..., 0:8], raw[..., 8:12]
    parts = [low[..., :8] & 15, low[..., :8] >> 4]
    tops = [high >> 2 * j & 3 for j in range(4)]
    scales = np.concatenate(parts, axis=-1) | np.concatenate(tops, axis=-1) << 4
    return codes, _scaled(blocks, 108, scales.astype(np.int8) - np.int8(32)), None


_TYPES = gguf.GGMLQuantizationType
_FORMATS: dict[gguf.GGMLQuantizationType, Callable[[U8], Parts]] = {
    _TYPES.Q4_0: _q4_0, _TYPES.Q4_1: _q4_1, _TYPES.Q5_0: _q5_0, _TYPES.Q5_1: _q5_1, _TYPES.Q8_0: _q8_0,
    _TYPES.Q2_K: _q2_k, _TYPES.Q3_K: _q3_k, _TYPES.Q4_K: _q4_k, _TYPES.Q5_K: _q5_k, _TYPES.Q6_K: _q6_k,
}  # fmt: skip


def supports(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether this quantized format is known here."""
    return kind in _FORMATS


def unpack(raw: U8, kind: gguf.GGMLQuantizationType, num_rows: int) -> QuantizedRows:
    """Codes, scales and minima of a quantized matrix [num_rows, K] given its bytes, none of which they share."""
    blocks = np.asarray(raw).reshape(num_rows, -1, gguf.GGML_QUANT_SIZES[kind][1])
    with np.errstate(all="ignore"):  # a broken file's scales are refused when they are packed
        codes, scale, minimum = _FORMATS[kind](blocks)
    group_size = codes.shape[2] * (2 if codes.dtype == np.uint8 else 1) // scale.shape[2]
    flat = torch.from_numpy(np.ascontiguousarray(codes).reshape(num_rows, -1))
    return QuantizedRows(flat, _matrix(scale), None if minimum is None else _matrix(minimum), group_size)


def _matrix(values: npt.NDArray[np.floating]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(len(values), -1))
