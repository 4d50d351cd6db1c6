"""Packed codes are those of the compressed-tensors library."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from worker.quantize.packing import num_packed, packed_parts, packed_rows, unpacked_parts, unpacked_rows
from worker.quantize.rounding import Precision, rounded_to_nearest


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 32), (5, 33), (17, 64)], ids=str)
def test_rows_are_packed_as_the_library_packs_them(bits: int, shape: tuple[int, int]) -> None:
    """Any size, every code; and back."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    codes = torch.randint(low, high + 1, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    codes.view(-1)[: high - low + 1] = torch.arange(low, high + 1)[: codes.numel()].to(torch.int8)
    packed = packed_rows(codes, bits)

    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert packed.shape == (shape[0], num_packed(shape[1], bits))
    assert torch.equal(unpack_from_int32(packed, bits, torch.Size(shape)), codes)
    assert torch.equal(unpacked_rows(packed, bits, shape[1]), codes)


@pytest.mark.parametrize("rows", [8, 13, 40])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_packed_down_the_columns(bits: int, rows: int) -> None:
    """As the library reads them; and a matrix comes back whole."""
    precision = Precision(bits, 32, is_symmetric=False)
    matrix = torch.randn(rows, 96, generator=torch.Generator().manual_seed(4)) + 0.4
    found = rounded_to_nearest(matrix, precision, torch.float16)
    parts = packed_parts(found, precision) | {"weight_shape": torch.tensor([rows, 96])}

    zero = unpack_from_int32(parts["weight_zero_point"], bits, torch.Size((rows, 3)), packed_dim=0)
    assert torch.equal(zero, found.zero)
    back = unpacked_parts(parts, precision)
    assert torch.equal(back.codes, found.codes)
    assert torch.equal(back.zero, found.zero)
    assert torch.equal(back.dequantize(), found.dequantize())
