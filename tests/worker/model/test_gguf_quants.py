"""Quantized formats mean what the `gguf` package says that they mean, bit for bit."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from kernels.weights import Int4Weight, Int8Weight
from worker.model.gguf_quants import supports, unpack
from worker.model.tensors import packed

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_random_blocks_are_exact(
    kind: str, num_rows: int, random_blocks: Callable[[str, tuple[int, int], int], np.ndarray]
) -> None:
    """Any bits in a block give exactly the reference's float32 values, also after packing, in 4 bits where the file has 4."""
    quantization = gguf.GGMLQuantizationType[kind]
    raw = random_blocks(kind, (num_rows, 512), 11)
    expected = torch.from_numpy(gguf.dequantize(raw, quantization).copy())

    weight = packed(unpack(raw.reshape(-1), quantization, num_rows), "test")

    assert torch.equal(expected, weight.dequantize())
    assert isinstance(weight, Int4Weight if kind in FOUR_BITS else Int8Weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_own_quantization_survives(kind: str) -> None:
    """A matrix quantized by the reference, with constant and all-zero groups, comes back as the reference reads it."""
    quantization = gguf.GGMLQuantizationType[kind]
    matrix = np.random.default_rng(3).normal(size=(16, 256)).astype(np.float32)
    matrix[3] = 0
    matrix[4, 32:64] = 0.75
    raw = gguf.quantize(matrix, quantization)
    expected = torch.from_numpy(gguf.dequantize(raw, quantization).copy())

    weight = packed(unpack(raw.reshape(-1), quantization, 16), "test")

    assert torch.equal(expected, weight.dequantize())


@pytest.mark.parametrize("minimum", [0.0, -1.0, -8.0, -15.0])
def test_each_nibble_at_each_position(minimum: float) -> None:
    """Low nibbles are the first half of a Q4_1 block, high ones the second, whatever the minimum (zero point 0, 1, 8, 15)."""
    for position in range(32):
        for nibble in range(16):
            block = np.zeros(20, dtype=np.uint8)
            block[0:4] = np.array([1.0, minimum], dtype=np.float16).view(np.uint8)
            block[4 + position % 16] = nibble << (4 if position >= 16 else 0)
            expected = torch.full((1, 32), minimum)
            expected[0, position] += nibble

            rows = unpack(block, gguf.GGMLQuantizationType.Q4_1, 1)

            assert torch.equal(expected, packed(rows, "test").dequantize())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1"])
def test_scales_keep_their_precision(kind: str) -> None:
    """float16 scales are not expanded: a quantized matrix takes no more bytes in memory than in the file."""
    quantization = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(np.random.default_rng(5).normal(size=(64, 512)).astype(np.float32), quantization)
    weight = packed(unpack(raw.reshape(-1), quantization, 64), "test")
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = 64 * 512 // block_elements
    # Q4_0's minimum is written out, 5-bit codes take a byte.
    grown = {"Q4_0": block_bytes + 2, "Q5_1": 32 + 4}.get(kind, block_bytes)

    assert blocks * grown == weight.nbytes


def test_formats_outside_the_promise_are_known_as_such() -> None:
    """Exactly the promised quantized formats are supported."""
    supported = {kind.name for kind in gguf.GGMLQuantizationType if supports(kind)}

    assert set(TYPES) == supported
