"""Packed matrices: exact both ways, no larger than what the checkpoint holds, and strict about what they take."""

import pytest
import torch

from kernels.errors import KernelError
from kernels.weights import DenseWeight, Int4Weight, Int8Weight


def grouped(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, group: int) -> torch.Tensor:
    """values * scale + minimum with one scale for each group of columns, straight from the definition."""
    wide = values.float() * scale.float().repeat_interleave(group, dim=1)
    return wide if minimum is None else wide + minimum.float().repeat_interleave(group, dim=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(1, 32, 32), (16, 96, 32), (17, 192, 64), (40, 128, 128), (33, 384, 128)]
)
def test_int4_packing_is_exact(n, k, group, dtype):
    """What was packed comes back bit for bit, whatever the panel's padding."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale, minimum = torch.rand(n, k // group).to(dtype), torch.randn(n, k // group).to(dtype)
    weight = Int4Weight.from_codes(codes, scale, minimum, group)
    assert (n, k) == weight.shape
    assert torch.equal(grouped(codes, scale, minimum, group), weight.dequantize())


@pytest.mark.parametrize("has_minimum", [False, True], ids=["scale", "scale-and-minimum"])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (17, 48, 16), (16, 96, 32), (33, 192, 64), (40, 128, 128)])
def test_int8_packing_is_exact(n, k, group, has_minimum):
    """What was packed comes back bit for bit, the code -128 included."""
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-128, 127])
    scale = torch.rand(n, k // group).half()
    minimum = torch.randn(n, k // group).half() if has_minimum else None
    weight = Int8Weight.from_codes(codes, scale, minimum, group)
    assert torch.equal(grouped(codes, scale, minimum, group), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dense_packing_is_exact(dtype):
    """A matrix of any width and height comes back bit for bit."""
    matrix = torch.randn(19, 37).to(dtype)
    assert torch.equal(matrix.float(), DenseWeight.from_matrix(matrix).dequantize())


@pytest.mark.parametrize(
    "rows", [slice(0, 5), slice(3, 40), slice(16, 32), slice(31, 33), slice(39, 99), slice(None)], ids=str
)
def test_dequantize_takes_any_slice_of_rows(make_int4, make_int8, rows):
    """Rows that begin or end within a panel are the same rows as in the whole matrix."""
    for weight in (make_int4(40, 64), make_int8(40, 64), DenseWeight.from_matrix(torch.randn(40, 7))):
        assert torch.equal(weight.dequantize()[rows], weight.dequantize(rows))


def test_gather_rows_takes_any_order(make_int4, make_int8):
    """Rows come in the order asked for, repeated ones too."""
    ids = torch.tensor([39, 0, 16, 15, 16, 39])
    for weight in (make_int4(40, 64), make_int8(40, 64, minimum=True), DenseWeight.from_matrix(torch.randn(40, 7))):
        assert torch.equal(weight.dequantize()[ids], weight.gather_rows(ids))


def test_memory_is_that_of_the_checkpoint(make_int4, make_int8):
    """Four bits stay four bits and float16 scales stay float16."""
    assert make_int4(64, 96).nbytes == 64 * 96 // 2 + 2 * 2 * 64 * 3
    assert make_int8(64, 96).nbytes == 64 * 96 + 2 * 64 * 3
    assert DenseWeight.from_matrix(torch.zeros(64, 96, dtype=torch.bfloat16)).nbytes == 2 * 64 * 96


def test_constant_groups_read_back(make_int4):
    """A group whose maximum is its minimum has scale 0, and an all-zero group reads back as zeros."""
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    weight = Int4Weight.from_codes(codes, torch.zeros(2, 1).half(), torch.tensor([[0.0], [1.5]]).half(), 32)
    assert torch.equal(torch.tensor([[0.0] * 32, [1.5] * 32]), weight.dequantize())


CODES = torch.zeros(4, 64, dtype=torch.uint8)
SCALE = torch.ones(4, 2).half()


@pytest.mark.parametrize(
    ("word", "codes", "scale", "minimum", "group"),
    [
        ("codes", CODES.to(torch.int8), SCALE, SCALE, 32),
        ("codes", CODES[0], SCALE, SCALE, 32),
        ("codes", CODES + 16, SCALE, SCALE, 32),
        ("group_size", CODES, SCALE, SCALE, 16),
        ("in_features", CODES[:, :40], SCALE, SCALE, 32),
        ("in_features", CODES[:, :0], SCALE[:, :0], SCALE[:, :0], 32),
        ("scale", CODES, SCALE[:, :1], SCALE[:, :1], 32),
        ("scale", CODES, SCALE.bfloat16(), SCALE.bfloat16(), 32),
        ("scale", CODES, SCALE * float("inf"), SCALE, 32),
        ("minimum", CODES, SCALE, SCALE * float("nan"), 32),
        ("minimum", CODES, SCALE, SCALE.float(), 32),
        ("minimum", CODES, SCALE, SCALE[:3], 32),
    ],
)
def test_bad_int4_is_refused(word, codes, scale, minimum, group):
    """What can't be a 4-bit matrix is an error that names the argument."""
    with pytest.raises(KernelError, match=f"Int4Weight: .*{word}"):
        Int4Weight.from_codes(codes, scale, minimum, group)


@pytest.mark.parametrize(
    ("word", "codes", "scale", "group"),
    [
        ("codes", CODES, SCALE, 32),
        ("group_size", CODES.to(torch.int8), SCALE, 8),
        ("scale", CODES.to(torch.int8), SCALE * float("nan"), 32),
        ("scale", CODES.to(torch.int8), SCALE.T, 32),
    ],
)
def test_bad_int8_is_refused(word, codes, scale, group):
    """What can't be an 8-bit matrix is an error that names the argument."""
    with pytest.raises(KernelError, match=f"Int8Weight: .*{word}"):
        Int8Weight.from_codes(codes, scale, None, group)


@pytest.mark.parametrize(
    "matrix", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.int8)]
)
def test_bad_dense_is_refused(matrix):
    """Only matrices of the three float types are taken."""
    with pytest.raises(KernelError, match="DenseWeight"):
        DenseWeight.from_matrix(matrix)
