"""bfloat16 and 8-bit floats (e4m3, no infinity) in integer arithmetic: the same on every GPU, and in Triton's interpreter, whose own casts
round wrongly."""

import triton
import triton.language as tl

NATIVE_E4M3 = 89  # the first capability whose processors convert e4m3 themselves


@triton.jit
def to_bfloat16(numbers):
    """float32 -> int16, the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = numbers.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(numbers == numbers, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def to_float16(numbers):
    """float32 -> int16, the bits of the nearest float16, ties to even, clamped to +-65504; NaN stays NaN."""
    clamped = tl.where(numbers == numbers, tl.minimum(tl.maximum(numbers, -65504.0), 65504.0), numbers)
    return clamped.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def to_e4m3(numbers):
    """float32 -> uint8: clamped to +-448, rounded to nearest even; NaN becomes 0x7f, which nothing else does."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(numbers), 448.0)
    normal = magnitude.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - 960  # the exponent's bias goes from 127 to 7
    # Below 2^-6 codes are multiples of 2^-9, as are the neighbours of 2^14 in float32: the addition rounds.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(numbers == numbers, code, 0x7F).to(tl.uint8)


@triton.jit
def from_e4m3(pairs, which: tl.constexpr, IS_NATIVE: tl.constexpr):
    """The lower or upper code of int16 pairs -> float16, exact; 0x7f and 0xff become NaN. `NATIVE_E4M3` says where it's native."""
    if IS_NATIVE:
        codes = (pairs if which == 0 else pairs >> 8).to(tl.uint8)
        result = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        codes = pairs << 8 if which == 0 else pairs
        magnitude = codes & 0x7F00
        # Exponent and mantissa moved into float16's fields mean 2^-8 of the number; only 0x7f carries into its top exponent bit.
        carry = ((magnitude + 0x100) >> 1) & 0x4000
        result = ((codes & -0x8000) | (magnitude >> 1) | carry).to(tl.float16, bitcast=True) * 256.0
    return result
