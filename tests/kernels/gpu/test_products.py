"""Matrix products for GPUs, interpreted: against float64, and row by row against themselves."""

from dataclasses import replace

import pytest
import torch

from kernels.backend import Backend
from kernels.dense_matmul import dense_matmul
from kernels.embedding import embedding
from kernels.errors import KernelError
from kernels.int4_matmul import int4_matmul
from kernels.int8_matmul import int8_matmul
from kernels.matmul import matmul
from kernels.placement import place
from kernels.weights import DenseWeight, Fp8Weight, Int4Weight, Int8Weight, Weight

DENSE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def activations(m: int, k: int) -> torch.Tensor:
    """Rows with outlying channels a hundred times larger than their neighbours, as hidden states have them."""
    x = torch.randn(m, k)
    x[:, ::29] *= 100
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 1, 32, 32), (5, 33, 96, 32), (17, 100, 64, 64), (3, 130, 320, 64), (2, 23, 384, 128), (65, 20, 160, 32)],
)
def test_int4(gpu, check_close, make_int4, poisoned, m, n, k, group, dtype):
    """Any number of rows and outputs, columns that fill no whole chunk, each group: the product is right and all of it written."""
    x, w = activations(m, k), make_int4(n, k, group, dtype)
    y = int4_matmul(x, place(w, gpu), poisoned(m, n), backend=gpu)
    check_close("gpu_matmul", y, x.double() @ w.dequantize().double().T)


@pytest.mark.parametrize("has_minimum", [False, True], ids=["scale", "scale-and-minimum"])
@pytest.mark.parametrize(
    ("m", "n", "k", "group"), [(1, 1, 16, 16), (5, 33, 48, 16), (17, 130, 96, 32), (3, 100, 64, 64), (2, 23, 384, 128)]
)
def test_int8(gpu, check_close, make_int8, poisoned, m, n, k, group, has_minimum):
    """The same for 8 bits, with and without minima."""
    x, w = activations(m, k), make_int8(n, k, group, minimum=has_minimum)
    y = int8_matmul(x, place(w, gpu), poisoned(m, n), backend=gpu)
    check_close("gpu_matmul", y, x.double() @ w.dequantize().double().T)


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 16, 8), (17, 33, 61), (2, 130, 200)])
def test_dense(gpu, check_close, poisoned, m, n, k, dtype):
    """Unquantized matrices of any size and type."""
    x, w = torch.randn(m, k), DenseWeight.from_matrix(torch.randn(n, k).to(DENSE[dtype]))
    y = dense_matmul(x, place(w, gpu), poisoned(m, n), backend=gpu)
    name = "gpu_matmul_float32" if dtype == "f32" else "gpu_matmul"
    check_close(name, y, x.double() @ w.dequantize().double().T)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 33, 96), (17, 130, 300), (2, 20, 1300)])
def test_fp8(gpu, check_close, poisoned, m, n, k):
    """8-bit floats with a scale for each row and 128 columns, in matrices of any size."""
    scale = torch.rand(n, -(-k // 128)) * 3e-3
    x, w = activations(m, k), Fp8Weight.from_codes(torch.randn(n, k).to(torch.float8_e4m3fn), scale)
    y = matmul(x, place(w, gpu), poisoned(m, n), backend=gpu)
    check_close("gpu_matmul", y, x.double() @ w.dequantize().double().T)


def test_every_fp8_code_at_every_place_is_exact(gpu):
    """Column k of W comes out of a one-hot row exactly, subnormal codes and both zeros too; and so do rows, as embeddings."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F][(torch.arange(254).unsqueeze(1) + torch.arange(130)) % 254]
    scale = torch.tensor([2.0**-7, 2.0**5]).repeat(254, 1)
    w = Fp8Weight.from_codes(codes.view(torch.float8_e4m3fn), scale)
    expected = codes.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(128, dim=1)[:, :130]
    assert torch.equal(expected.T, matmul(torch.eye(130), place(w, gpu), backend=gpu))
    ids = torch.tensor([253, 0, 8, 7])
    assert torch.equal(expected[ids], embedding(ids, place(w, gpu), backend=gpu))


def test_columns_in_another_order(gpu, check_close, make_int4):
    """A weight that remembers where its columns belong multiplies its input there; no row of it can be looked up."""
    x, w = activations(5, 192), replace(make_int4(33, 192, 64), order=torch.randperm(192, dtype=torch.int32))
    check_close("gpu_matmul", int4_matmul(x, place(w, gpu), backend=gpu), x.double() @ w.dequantize().double().T)
    with pytest.raises(KernelError, match="order of columns"):
        embedding(torch.tensor([0]), place(w, gpu), backend=gpu)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_nibble_at_every_place_is_exact(gpu, group):
    """Column k of W comes out of a one-hot row exactly: for each code, scale, zero point and place."""
    n, k = 64, 2 * group
    codes = ((torch.arange(n).unsqueeze(1) + torch.arange(k)) % 16).to(torch.uint8)
    scale = torch.tensor([2.0**-3, 2.0**4]).repeat(n, 1)
    zero_points = torch.tensor([0, 1, 8, 15]).repeat_interleave(16).unsqueeze(1)
    w = Int4Weight.from_codes(codes, scale.half(), (-zero_points * scale).half(), group)
    expected = (codes.float() - zero_points) * scale.repeat_interleave(group, dim=1)
    assert torch.equal(expected.T, int4_matmul(torch.eye(k), place(w, gpu), backend=gpu))


@pytest.mark.parametrize("group", [16, 32, 128])
def test_every_byte_at_every_place_is_exact(gpu, group):
    """The same for all 256 codes of 8 bits."""
    codes = ((torch.arange(256).unsqueeze(1) + torch.arange(2 * group)) % 256 - 128).to(torch.int8)
    scale = torch.tensor([2.0**-3, 2.0**4]).repeat(256, 1)
    w = place(Int8Weight.from_codes(codes, scale.half(), None, group), gpu)
    expected = codes.float() * scale.repeat_interleave(group, dim=1)
    assert torch.equal(expected.T, int8_matmul(torch.eye(2 * group), w, backend=gpu))


@pytest.fixture(scope="module")
def matrices(make_int4, make_int8):
    """One placed matrix of each kind, with more columns than a range."""
    torch.manual_seed(1)
    wide = torch.randn(40, 1100)
    dense = {name: DenseWeight.from_matrix(wide.to(dtype)) for name, dtype in DENSE.items()}
    quantized: dict[str, Weight] = {"int4": make_int4(40, 1120), "int8": make_int8(40, 1120, minimum=True)}
    quantized["fp8"] = Fp8Weight.from_codes(wide.to(torch.float8_e4m3fn), torch.rand(40, 9))
    return {name: place(w, Backend.GPU) for name, w in (quantized | dense).items()}


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", *DENSE])
def test_rows_alone_and_in_a_batch(gpu, matrices, kind):
    """A row's bits are the same alone (its ranges shared by programs) and among 140 (all ranges in one program)."""
    w = matrices[kind]
    x = torch.randn(140, w.shape[1]) * 20
    together = matmul(x, w, backend=gpu)
    for rows in (slice(0, 1), slice(len(x) - 1, len(x)), slice(70, 75), slice(3, 20), slice(60, 130)):
        assert torch.equal(together[rows], matmul(x[rows].contiguous(), w, backend=gpu))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", *DENSE])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_bad_row_harms_no_other(gpu, matrices, kind, fault):
    """NaN or infinity in a row leaves its neighbours' bits alone, and is not laundered into numbers."""
    w = matrices[kind]
    x = torch.randn(5, w.shape[1])
    healthy = matmul(x, w, backend=gpu)
    x[2, 40] = fault
    result = matmul(x, w, backend=gpu)
    assert torch.equal(healthy[[0, 1, 3, 4]], result[[0, 1, 3, 4]])
    assert not bool(torch.isfinite(result[2]).any())


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-31, 1e-20, 1e20, 1e34])
@pytest.mark.parametrize("weight_scale", [2.0**-20, 1.0, 2.0**9])
def test_any_magnitude(gpu, magnitude, weight_scale):
    """Activations and weights far beyond the range of float16 give what they should, never NaN or infinity; subnormals may count as 0."""
    scale, codes = torch.rand(16, 2) * weight_scale, torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    four = Int4Weight.from_codes(codes, scale, -8 * scale, 32)
    x = torch.randn(2, 64).clamp(-1, 1) * magnitude / max(weight_scale, 1)
    y = int4_matmul(x, place(four, gpu), backend=gpu)
    exact = x.double() @ four.dequantize().double().T
    assert float((y.double() - exact).abs().max()) <= 1e-3 * float(exact.abs().max()) + 1e-38


def test_bfloat16_matrices_lose_nothing(gpu):
    """A bfloat16 matrix, brought to float16 with a power of two, is the same matrix."""
    w = DenseWeight.from_matrix((torch.randn(40, 70) * 1e-5).bfloat16())
    placed = place(w, gpu)
    assert torch.equal(w.dequantize(), placed.matrix[:40, :70].float() * placed.unit)


@pytest.mark.parametrize("kind", ["int4", "int8", *DENSE])
def test_embedding(gpu, make_int4, make_int8, kind):
    """Rows looked up in a placed matrix are the matrix's."""
    w = {"int4": lambda: make_int4(150, 96), "int8": lambda: make_int8(150, 96)}.get(
        kind, lambda: DenseWeight.from_matrix(torch.randn(150, 96).to(DENSE[kind]))
    )()
    ids = torch.tensor([149, 0, 7, 7, 128])
    assert torch.allclose(
        embedding(ids, w, backend=Backend.REF), embedding(ids, place(w, gpu), backend=gpu), rtol=1e-6, atol=1e-7
    )
    beyond = embedding(torch.tensor([150, 7, -1]), place(w, gpu), backend=gpu)
    assert bool(beyond[[0, 2]].isnan().all())
    assert bool(beyond[1].isfinite().all())


def test_four_bits_stay_four_bits(gpu, make_int4, make_int8):
    """Placed matrices take the bytes of their codes and 16-bit scales, and no more where nothing is padded."""
    assert place(make_int4(256, 1024), gpu).nbytes == 256 * 1024 // 2 + 256 * 32 * 4
    assert place(make_int8(256, 1024), gpu).nbytes == 256 * 1024 + 256 * 32 * 2


def test_a_matrix_is_placed_once(gpu, make_int4):
    """Placing a placed matrix, or placing for a CPU, changes nothing."""
    w = make_int4(20, 64)
    placed = place(w, gpu)
    assert place(placed, gpu) is placed
    assert place(w, Backend.CPU) is w


def test_no_rows(gpu, matrices):
    """An empty batch has an empty result."""
    for w in matrices.values():
        assert matmul(torch.zeros(0, w.shape[1]), w, backend=gpu).shape == (0, w.shape[0])


def test_matrices_of_another_backend_are_refused(gpu, make_int4, make_int8):
    """A matrix laid out for another backend, or of another kind, is not read as if it were the right one."""
    x, four, eight = torch.zeros(3, 64), make_int4(20, 64), make_int8(20, 64)
    dense = DenseWeight.from_matrix(torch.zeros(20, 64))
    for multiply, wrong in (
        (int4_matmul, four), (int4_matmul, place(eight, gpu)), (int8_matmul, eight), (int8_matmul, place(four, gpu)),
        (dense_matmul, dense), (dense_matmul, place(four, gpu)),
    ):  # fmt: skip
        with pytest.raises(KernelError, match=f"^{multiply.__name__}: w must be"):
            multiply(x, wrong, backend=gpu)
    with pytest.raises(KernelError, match=r"^int4_matmul: w must be"):
        int4_matmul(x, place(four, gpu), backend=Backend.CPU)


def test_activations_are_checked(gpu, make_int4):
    """Another type, width, layout or device of x, and an output of another shape."""
    w = place(make_int4(20, 64), gpu)
    for x in (torch.zeros(3, 64).half(), torch.zeros(3, 32), torch.zeros(64, 3).T, torch.zeros(3, 64, device="meta")):
        with pytest.raises(KernelError, match=r"^int4_matmul: x "):
            int4_matmul(x, w, backend=gpu)
    with pytest.raises(KernelError, match=r"^int4_matmul: out "):
        int4_matmul(torch.zeros(3, 64), w, torch.zeros(4, 20), backend=gpu)
