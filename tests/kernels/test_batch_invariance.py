"""The promise of the package: a row's bits depend on that row's inputs alone, in every op and backend."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.dense_matmul import dense_matmul
from kernels.fp8_matmul import fp8_matmul
from kernels.gelu_mul import gelu_mul
from kernels.head_norm import head_norm
from kernels.int4_matmul import int4_matmul
from kernels.int8_matmul import int8_matmul
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.silu_mul import silu_mul
from kernels.weights import DenseWeight, Fp8Weight

ROWS = [1, 2, 3, 7, 8, 17, 63, 100]
WIDTH = 96
RowOp = Callable[[torch.Tensor, Backend], torch.Tensor]


@pytest.fixture(
    params=[
        "int4",
        "int8",
        "bf16",
        "f16",
        "f32",
        "fp8",
        "int4 in another order",
        "rms_norm",
        "rotary",
        "silu_mul",
        "gelu_mul",
        "head_norm",
    ]
)
def op(request: pytest.FixtureRequest, make_int4, make_int8) -> RowOp:
    """Each op as a function of rows float32 [M, 96] alone; rotary's position is the row's first number, so that it travels along."""
    four, eight = make_int4(70, WIDTH), make_int8(70, WIDTH, minimum=True)
    matrix, weight = torch.randn(70, WIDTH), torch.randn(WIDTH)
    dense = {
        name: DenseWeight.from_matrix(matrix.to(dtype))
        for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32))
    }
    table = rotary_table(torch.rand(8), 64)
    floats = Fp8Weight.from_codes(matrix.to(torch.float8_e4m3fn), torch.rand(70, 1))
    moved = replace(four, order=torch.randperm(WIDTH, dtype=torch.int32))

    def turn(x: torch.Tensor, backend: Backend) -> torch.Tensor:
        turned = x.clone().view(-1, WIDTH // 16, 16)
        rotary(turned, x[:, 0].nan_to_num().abs().clamp(max=63).int(), table, backend=backend)
        return turned.flatten(1)

    def normalize(x: torch.Tensor, backend: Backend) -> torch.Tensor:
        heads = x.clone().view(-1, WIDTH // 48, 48)
        head_norm(heads, weight[:48].contiguous(), 1e-6, backend=backend)
        return heads.flatten(1)

    ops: dict[str, RowOp] = {
        "int4": lambda x, backend: int4_matmul(x, four, backend=backend),
        "int8": lambda x, backend: int8_matmul(x, eight, backend=backend),
        "fp8": lambda x, backend: fp8_matmul(x, floats, backend=backend),
        "int4 in another order": lambda x, backend: int4_matmul(x, moved, backend=backend),
        "rms_norm": lambda x, backend: rms_norm(x, weight, 1e-6, backend=backend),
        "rotary": turn,
        "silu_mul": lambda x, backend: silu_mul(x, backend=backend),
        "gelu_mul": lambda x, backend: gelu_mul(x, backend=backend),
        "head_norm": normalize,
    }
    if request.param in dense:
        return lambda x, backend: dense_matmul(x, dense[request.param], backend=backend)
    return ops[request.param]


@pytest.mark.parametrize("m", ROWS)
def test_rows_alone_and_in_a_batch(backend, op, m):
    """Each row of a batch of any size has the bits that it has alone."""
    x = torch.randn(m, WIDTH) * 20
    alone = torch.cat([op(x[row : row + 1].clone(), backend) for row in range(m)])
    assert torch.equal(alone, op(x, backend))


def test_a_row_at_each_place_of_a_batch(backend, op):
    """One row has the same bits first, last and anywhere between, among neighbours that are far larger."""
    row = torch.randn(WIDTH) * 20
    alone = op(row.unsqueeze(0).clone(), backend)[0]
    for place in range(19):
        x = torch.randn(19, WIDTH) * 1e4
        x[place] = row
        assert torch.equal(alone, op(x, backend)[place])


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_bad_row_harms_no_other(backend, op, fault):
    """NaN or infinity in a row leaves its neighbours' bits alone, and a NaN is not laundered into numbers."""
    x = torch.randn(9, WIDTH)
    healthy = op(x, backend)
    x[4, 40] = fault
    result = op(x, backend)
    assert torch.equal(healthy[[0, 1, 2, 3, 5, 6, 7, 8]], result[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert not bool(torch.isfinite(result[4]).all())


@pytest.mark.parametrize("m", [1, 5, 130])
def test_threads_change_no_bit(op, m):
    """One thread, two, or more than there are cores give the same bits."""
    x = torch.randn(m, WIDTH)
    results = []
    for count in (1, 2, 3, 8):
        _native.set_num_threads(count)
        results.append(op(x, Backend.CPU))
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_instruction_sets_change_no_bit(on_each_isa, op):
    """Portable code, AVX2 and AVX-512 give the same bits."""
    x = torch.randn(23, WIDTH) * 20
    results = list(on_each_isa(lambda: op(x, Backend.CPU)).values())
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_alignment_changes_no_bit(backend, op):
    """Rows that begin at any address of a buffer give the same bits."""
    rows = torch.randn(3, WIDTH)
    expected = op(rows, backend)
    buffer = torch.zeros(3 * WIDTH + 16)
    for offset in range(16):
        shifted = buffer[offset : offset + 3 * WIDTH].view(3, WIDTH)
        shifted.copy_(rows)
        assert torch.equal(expected, op(shifted, backend))


@pytest.fixture(params=[("bf16", None), ("fp8", None), ("bf16", 50)], ids=["bf16", "fp8", "bf16-window"])
def attention(request: pytest.FixtureRequest, make_paged) -> tuple[Callable[..., torch.Tensor], int]:
    """Attention of some rows of three sequences, two of them longer than a range of keys, and the number of rows."""
    dtype, window = request.param

    def attend(backend: Backend, rows: slice | list[int] | None = None) -> torch.Tensor:
        return case.attend(backend, rows, window)

    case = make_paged(KvLayout(1, 80, 3, 64, 16, dtype), [300, 9, 200], [150, 9, 3], 3, Backend.CPU)
    return attend, 162


def test_attention_rows_alone_and_in_a_batch(backend, attention):
    """A token's attention has the same bits computed alone (decode) as with its whole prompt and with other sequences."""
    attend, num_rows = attention
    together = attend(backend)
    for row in [*range(0, num_rows, 11), 149, 150, 158, 159, num_rows - 1]:
        assert torch.equal(together[row : row + 1], attend(backend, [row]))


@pytest.mark.parametrize("sizes", [[1, 161], [15, 16, 17, 114], [100, 62], [64, 64, 34], [149, 2, 11]], ids=str)
def test_attention_in_chunks(backend, attention, sizes):
    """Chunks of a prompt, wherever they are cut, give the bits of the whole."""
    attend, _ = attention
    ends = torch.tensor(sizes).cumsum(0).tolist()
    chunks = [attend(backend, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    assert torch.equal(attend(backend), torch.cat(chunks))


def test_attention_on_any_number_of_threads(attention):
    """A long stream alone, whose ranges threads share, and a batch have the same bits on each number of threads."""
    attend, _ = attention
    for rows in ([149], None):
        results = []
        for count in (1, 2, 3, 8):
            _native.set_num_threads(count)
            results.append(attend(Backend.CPU, rows))
        for other in results[1:]:
            assert torch.equal(results[0], other)


def test_attention_on_any_instruction_set(on_each_isa, attention):
    """Portable code, AVX2 and AVX-512 give the same bits."""
    attend, _ = attention
    results = list(on_each_isa(lambda: attend(Backend.CPU)).values())
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_pages_change_no_bit(backend, dtype):
    """Where a sequence's tokens lie, and how many share a page, is no input to its result."""
    k, v, q = torch.randn(150, 2, 16), torch.randn(150, 2, 16), torch.randn(1, 4, 16)
    place, results = torch.arange(150), []
    for size in (1, 4, 16, 64):
        pool = KvPool.allocate(KvLayout(1, 150, 2, 16, size, dtype))
        table = torch.randperm(150, dtype=torch.int32).view(1, 150)
        kv_write(k, v, table[0, place // size].long() * size + place % size, pool, 0, backend=backend)
        rows = AttentionRows(table, torch.zeros(1, dtype=torch.int32), torch.tensor([149], dtype=torch.int32))
        results.append(paged_attention(q, pool, 0, rows, softmax_scale=0.25, backend=backend))
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_sequence_with_nan_harms_no_other(backend, make_paged, side):
    """NaN in a query, or in a key or value of one sequence, ends in that sequence's rows only."""
    case = make_paged(KvLayout(1, 60, 2, 16, 16, "bf16"), [150, 140, 20], [3, 3, 3], 2, backend)
    healthy = case.attend(backend)
    if side == "q":
        case.q[4, 0, 0] = float("nan")
    else:
        page = int(case.rows.page_table[1, 0])
        getattr(case.pool, side)[0, page, 0, 5, 3] = float("nan")
    result = case.attend(backend)
    others = [0, 1, 2, 6, 7, 8]
    assert torch.equal(healthy[others], result[others])
    assert bool(torch.isnan(result[4]).any())


def test_scores_of_minus_infinity(backend, make_paged):
    """Where every score of a range of keys overflows downwards, a row alone and in a batch still agree, and other keys decide."""
    case = make_paged(KvLayout(1, 60, 1, 16, 16, "bf16"), [300], [100], 1, backend)
    case.pool.k[0, case.rows.page_table[0, :8].long()] = -1e38
    case.q.abs_().mul_(4)
    together = case.attend(backend)
    assert bool(torch.isfinite(together).all())
    assert torch.equal(together[99:], case.attend(backend, [99]))
