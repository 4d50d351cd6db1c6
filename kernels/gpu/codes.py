"""Quantized weights in registers: from packed words to float16."""

import triton
import triton.language as tl


@triton.jit
def _plane_of_4_bits(words, plane: tl.constexpr):
    """The four 4-bit codes of a word, one at a time: float16 0..15, exact, for two or three instructions each."""
    shifted = words if plane < 2 else words >> 8
    if plane % 2 == 0:
        return ((shifted & 0x000F) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return ((shifted & 0x00F0) | 0x6400).to(tl.float16, bitcast=True) * 0.0625 - 64.0


@triton.jit
def _plane_of_8_bits(words, plane: tl.constexpr):
    """The two 8-bit codes of a word (stored + 128): float16 -128..127, exact."""
    shifted = words if plane == 0 else words >> 8
    return ((shifted & 0x00FF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def _low_half(words):
    """The lower 16 bits of 32 as float16."""
    return (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _high_half(words):
    """The upper 16 bits of 32 as float16."""
    return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def plane_of_weights(words, plane: tl.constexpr, scale, BITS: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """The weights whose codes are in one plane of int16 words: float16, of the words' shape.

    `scale` is broadcast to it: float16, or int32 with the scale in its lower half and the minimum in its upper one.
    """
    code = _plane_of_4_bits(words, plane) if BITS == 4 else _plane_of_8_bits(words, plane)
    if HAS_MINIMUM:
        return tl.fma(
            code, tl.broadcast_to(_low_half(scale), code.shape), tl.broadcast_to(_high_half(scale), code.shape)
        )
    return code * scale
