"""The native packer lays out the same bytes as the reference."""

import pytest
import torch

from kernels.packing import all_finite, pack_elements, pack_int4, pack_int8
from kernels.packing.ref import all_finite_ref, pack_elements_ref, pack_int4_ref, pack_int8_ref

SHAPES = [(1, 32, 32), (16, 96, 32), (33, 192, 64), (37, 384, 128), (300, 128, 128)]


def numbers(n: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, groups).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_minimum", [False, True], ids=["scale", "scale-and-minimum"])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_quantized(n, k, group, has_minimum, dtype):
    """Every byte, those of rows that fill up the last panel included."""
    scale = numbers(n, k // group, dtype)
    minimum = numbers(n, k // group, dtype) if has_minimum else None
    pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    assert torch.equal(pack_int4_ref(pairs, scale, minimum, group), pack_int4(pairs, scale, minimum, group))
    assert torch.equal(pack_int8_ref(codes, scale, minimum, group), pack_int8(codes, scale, minimum, group))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (33, 61), (100, 130)])
def test_elements(n, k, dtype):
    """Elements of 1, 2 and 4 bytes, in matrices of any size."""
    matrix = (torch.randn(n, k) * 100).to(dtype)
    assert torch.equal(pack_elements_ref(matrix), pack_elements(matrix))


def test_operands_need_not_be_contiguous():
    """Columns of a wider matrix, transposed and repeated scales."""
    wide = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    scale = torch.randn(2, 40).half().T
    one = torch.randn(1, 1).half().expand(40, 2)
    expected = pack_int4_ref(wide[:, 16:48].contiguous(), scale.contiguous(), one.contiguous(), 32)
    assert torch.equal(expected, pack_int4(wide[:, 16:48], scale, one, 32))
    assert torch.equal(pack_elements_ref(wide.T.contiguous()), pack_elements(wide.T))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_not_finite_is_found_wherever_it_is(dtype):
    """One NaN or infinity among a million numbers, at either end or between."""
    largest = torch.full((1 << 20,), torch.finfo(dtype).max).to(dtype)
    largest[::2] = torch.tensor(torch.finfo(dtype).min).to(dtype)
    assert all_finite(largest)
    assert all_finite_ref(largest[:1000])
    for value in ("nan",) if dtype is torch.float8_e4m3fn else ("nan", "inf", "-inf"):
        for place in (0, 1, (1 << 18) - 1, 1 << 18, 777_777, len(largest) - 1):
            spoilt = largest.clone()
            spoilt[place] = torch.tensor(float(value)).to(dtype)
            assert not all_finite(spoilt)
            assert not all_finite_ref(spoilt)
    assert all_finite(largest[:0])
