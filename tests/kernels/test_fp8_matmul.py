"""Products with weights in 8-bit floats, against float64 and, for every code at every place, exactly; and columns in another order."""

from dataclasses import replace

import pytest
import torch

from kernels.backend import Backend
from kernels.embedding import embedding
from kernels.errors import KernelError
from kernels.fp8_matmul import fp8_matmul
from kernels.int4_matmul import int4_matmul
from kernels.int4_matmul.ref import matmul_rounded_activations
from kernels.int8_matmul import int8_matmul
from kernels.matmul import matmul
from kernels.recording import Recording
from kernels.weights import Fp8Weight, Int4Weight, Int8Weight


def make_fp8(n: int, k: int) -> Fp8Weight:
    return Fp8Weight.from_codes(torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, -(-k // 128)) + 0.1)


def all_codes() -> torch.Tensor:
    """The 254 codes that are numbers."""
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[(codes & 0x7F) != 0x7F]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (33, 61), (100, 130), (48, 384), (17, 257)])
@pytest.mark.parametrize("m", [1, 3, 4, 17])
def test_shapes(backend, check_close, poisoned, m, n, k):
    """Any numbers of rows, inputs and outputs, groups cut short: the product is right and all of it written."""
    x, w = torch.randn(m, k), make_fp8(n, k)
    y = fp8_matmul(x, w, poisoned(m, n), backend=backend)
    check_close("matmul", y, x.double() @ w.dequantize().double().T)


@pytest.mark.parametrize("m", [1, 200])
def test_every_code_and_position_is_exact(backend, m):
    """Column k of W comes out of a one-hot row exactly: subnormal codes, both zeros and the largest too."""
    codes = all_codes()[(torch.arange(254).unsqueeze(1) + torch.arange(200)) % 254].view(torch.float8_e4m3fn)
    scale = torch.tensor([2.0**-7, 2.0**5]).repeat(254, 1)
    w = Fp8Weight.from_codes(codes, scale)
    expected = (codes.float() * scale.repeat_interleave(128, dim=1)[:, :200]).T
    x = torch.eye(200)
    y = (
        fp8_matmul(x, w, backend=backend)
        if m > 1
        else torch.cat([fp8_matmul(x[i : i + 1], w, backend=backend) for i in range(200)])
    )
    assert torch.equal(expected, y)


@pytest.mark.parametrize("m", [1, 11])
def test_all_instruction_sets_agree(on_each_isa, m):
    """Additions run in one order everywhere, so that each instruction set has the bits of the portable code."""
    x, w = torch.randn(m, 300), make_fp8(50, 300)
    results = on_each_isa(lambda: fp8_matmul(x, w, backend=Backend.CPU))
    assert all(torch.equal(results["portable"], result) for result in results.values())


def test_rows_as_embeddings(backend):
    """Rows come out dequantized, in any order."""
    w = make_fp8(40, 300)
    ids = torch.tensor([39, 0, 16, 15, 39])
    assert torch.equal(w.dequantize()[ids], embedding(ids, w, backend=backend))
    assert torch.equal(w.dequantize()[3:20], w.dequantize(slice(3, 20)))


@pytest.mark.parametrize(
    ("word", "codes", "scale"),
    [
        ("codes", torch.zeros(4, 8), torch.ones(4, 1)),
        ("codes", torch.zeros(4, 0, dtype=torch.float8_e4m3fn), torch.ones(4, 0)),
        ("codes", torch.full((4, 8), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(4, 1)),
        ("scale", torch.zeros(4, 8, dtype=torch.float8_e4m3fn), torch.ones(4, 2)),
        ("scale", torch.zeros(4, 8, dtype=torch.float8_e4m3fn), torch.ones(4, 1).half()),
        ("scale", torch.zeros(4, 8, dtype=torch.float8_e4m3fn), torch.full((4, 1), float("inf"))),
    ],
)
def test_bad_matrices_are_refused(word, codes, scale):
    """What can't be such a matrix is an error that names the argument."""
    with pytest.raises(KernelError, match=f"Fp8Weight: .*{word}"):
        Fp8Weight.from_codes(codes, scale)


def test_another_kind_of_weight_is_refused(make_int4):
    """The op takes its own weights."""
    with pytest.raises(KernelError, match="fp8_matmul: w"):
        fp8_matmul(torch.randn(1, 64), make_int4(16, 64), backend=Backend.REF)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("m", [1, 7, 40])
def test_columns_in_another_order(backend, check_close, make_int4, make_int8, m, group):
    """A weight whose columns lie in another order multiplies its input where it belongs."""
    order = torch.randperm(384, dtype=torch.int32)
    x = torch.randn(m, 384)
    for make, product in ((make_int4, int4_matmul), (make_int8, int8_matmul)):
        sorted_weight = make(40, 384, group)
        w = replace(sorted_weight, order=order)
        inverse = torch.argsort(order)
        assert torch.equal(sorted_weight.dequantize()[:, inverse], w.dequantize())
        y = product(x, w, backend=backend)
        check_close("matmul_rounding", y, x.double() @ w.dequantize().double().T)
        if backend is Backend.CPU:
            gathered = x[:, order.long()].contiguous()
            assert torch.equal(product(gathered, sorted_weight, backend=backend), y)
            check_close("matmul", y, matmul_rounded_activations(gathered, sorted_weight))
        ids = torch.tensor([39, 0, 17])
        assert torch.equal(w.dequantize()[ids], embedding(ids, w, backend=backend))


@pytest.mark.parametrize(
    "order",
    [
        torch.arange(63, dtype=torch.int32),
        torch.arange(64),
        torch.arange(128, dtype=torch.int32)[::2],
        torch.arange(1, 65, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32),
    ],
    ids=["too short", "int64", "not contiguous", "outside", "twice"],
)
def test_bad_orders_are_refused(order):
    """An order that doesn't name each column once would read other memory."""
    pairs, scale = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 2).half()
    with pytest.raises(KernelError, match="order"):
        Int4Weight.from_pairs(pairs, scale, scale, 32, order)
    with pytest.raises(KernelError, match="order"):
        Int8Weight.from_codes(torch.zeros(16, 64, dtype=torch.int8), scale, None, 32, order)


def test_both_can_be_recorded(isa, make_int4):
    """A recorded product computes with what its input holds when it is run."""
    weights = (make_fp8(40, 96), replace(make_int4(40, 96), order=torch.randperm(96, dtype=torch.int32)))
    x, outs = torch.zeros(3, 96), [torch.zeros(3, 40) for _ in weights]
    recording = Recording()
    with recording.record():
        for w, out in zip(weights, outs, strict=True):
            matmul(x, w, out, backend=Backend.CPU)
    x.copy_(torch.randn(3, 96))
    recording.run()
    for w, out in zip(weights, outs, strict=True):
        assert torch.equal(matmul(x, w, backend=Backend.CPU), out)
