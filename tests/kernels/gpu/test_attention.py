"""Attention over pages for GPUs, interpreted: against float64, and row by row against itself."""

import pytest
import torch

from kernels.backend import Backend
from kernels.kv_pool import AttentionRows, KvLayout
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(
    ("kv_heads", "ratio", "dim", "page_size"), [(3, 3, 64, 16), (2, 7, 24, 8), (1, 20, 16, 32), (1, 1, 80, 16)]
)
def test_layouts(gpu, check_close, make_paged, kv_heads, ratio, dim, page_size, dtype):
    """Page sizes, head sizes and ratios of query to kv heads; several sequences at once; prompts and single tokens; stale NaN."""
    case = make_paged(
        KvLayout(2, 20, kv_heads, dim, page_size, dtype), [1, 37, 63], [1, 11, 1], ratio, Backend.REF, placed_for=gpu
    )
    check_close(f"gpu_attention_{dtype}", case.attend(gpu), case.exact())


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_scales(gpu, check_close, make_paged, dtype):
    """Each head's scales apply to its keys and values."""
    scales = torch.tensor([[0.25, 3.0]])
    case = make_paged(
        KvLayout(1, 20, 2, 16, 16, dtype),
        [50, 20],
        [3, 1],
        2,
        Backend.REF,
        placed_for=gpu,
        k_scale=scales,
        v_scale=scales.flip(1),
    )
    check_close(f"gpu_attention_{dtype}", case.attend(gpu), case.exact())


@pytest.mark.parametrize("window", [1, 33, 257])
def test_sliding_window(gpu, check_close, make_paged, window):
    """A row sees the last `window` keys, its own among them, wherever ranges and tiles begin."""
    case = make_paged(KvLayout(1, 60, 1, 16, 8, "bf16"), [290, 20], [12, 1], 2, Backend.REF, placed_for=gpu)
    together = case.attend(gpu, window=window)
    check_close("gpu_attention_bf16", together, case.exact(window))
    for row in (0, 11, 12):
        assert torch.equal(together[row : row + 1], case.attend(gpu, [row], window))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_rows_alone_in_chunks_and_in_a_batch(gpu, check_close, make_paged, dtype):
    """A token's bits are the same alone (decode, ranges shared by programs), in any chunk of its prompt, and beside others."""
    case = make_paged(KvLayout(1, 60, 1, 32, 16, dtype), [530, 9, 100], [40, 9, 1], 3, Backend.REF, placed_for=gpu)
    together = case.attend(gpu)
    check_close(f"gpu_attention_{dtype}", together, case.exact())
    for row in (0, 31, 32, 39, 40, 49):
        assert torch.equal(together[row : row + 1], case.attend(gpu, [row]))
    for sizes in ([15, 26, 9],):
        ends = torch.tensor(sizes).cumsum(0).tolist()
        chunks = [case.attend(gpu, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        assert torch.equal(together, torch.cat(chunks))


def test_pages_change_no_bit(gpu, make_paged):
    """Where a sequence's tokens lie, and how many share a page, is no input to its result."""
    results = []
    for size in (8, 32):
        torch.manual_seed(3)
        layout = KvLayout(1, 40, 1, 16, size, "fp8")
        case = make_paged(layout, [300], [1], 2, Backend.REF, placed_for=gpu)
        torch.manual_seed(4)
        k, v, q = torch.randn(300, 1, 16), torch.randn(300, 1, 16), torch.randn(1, 2, 16)
        place = torch.arange(300)
        slots = case.rows.page_table[0, place // size].long() * size + place % size
        kv_write(k, v, slots, case.pool, 0, backend=Backend.REF)
        results.append(paged_attention(q, case.pool, 0, case.rows, softmax_scale=0.25, backend=gpu))
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_sequence_with_nan_harms_no_other(gpu, make_paged, side):
    """NaN in one sequence ends in that sequence's rows only."""
    case = make_paged(KvLayout(1, 60, 2, 16, 16, "bf16"), [50, 40, 20], [3, 3, 1], 2, Backend.REF, placed_for=gpu)
    healthy = case.attend(gpu)
    if side == "q":
        case.q[4, 0, 0] = float("nan")
    else:
        stored = case.pool.k_rows if side == "k" else case.pool.v
        stored[0, int(case.rows.page_table[1, 0]), 0, 5, 3] = float("nan")
    result = case.attend(gpu)
    assert torch.equal(healthy[[0, 1, 2, 6]], result[[0, 1, 2, 6]])
    assert bool(torch.isnan(result[4]).any())


@pytest.mark.parametrize("code", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_harms_no_row_before_it(gpu, make_paged, code):
    """A value that is not finite reaches the rows that see it, and no earlier row of the same tile."""
    case = make_paged(KvLayout(1, 20, 1, 16, 16, "bf16"), [40], [12], 2, Backend.REF, placed_for=gpu)
    healthy = case.attend(gpu)
    case.pool.v[0, int(case.rows.page_table[0, 2]), 0, 2, 5] = code  # position 34, row 6
    result = case.attend(gpu)
    assert torch.equal(healthy[:6], result[:6])
    assert not bool(torch.isfinite(result[6:]).all(dim=(1, 2)).any())


def test_scores_of_minus_infinity(gpu, make_paged):
    """Where every score of a range overflows downwards, a row alone and in a batch still agree, and other keys decide."""
    case = make_paged(KvLayout(1, 60, 1, 16, 16, "bf16"), [300], [10], 1, Backend.REF, placed_for=gpu)
    case.pool.k[0, case.rows.page_table[0, :16].long()] = -1e38
    case.q.abs_().mul_(4)
    together = case.attend(gpu)
    assert bool(torch.isfinite(together).all())
    assert torch.equal(together[9:], case.attend(gpu, [9]))


def test_padding_rows_read_nothing(gpu, make_paged):
    """A row at a negative position gives zeros, whatever lies in the page that its table names, and changes nobody's bits."""
    case = make_paged(KvLayout(1, 20, 1, 16, 16, "bf16"), [40, 9], [1, 1], 2, Backend.REF, placed_for=gpu)
    expected = case.attend(gpu)
    table = torch.cat([case.rows.page_table, torch.full((2, case.rows.page_table.shape[1]), 19, dtype=torch.int32)])
    rows = AttentionRows(
        table, torch.arange(4, dtype=torch.int32), torch.tensor([39, 8, -1, -1], dtype=torch.int32)
    ).to(torch.device("cpu"))
    q = torch.cat([case.q, torch.full_like(case.q, float("nan"))])
    result = paged_attention(
        q, case.pool, 0, rows, softmax_scale=case.softmax_scale, out=torch.full_like(q, float("nan")), backend=gpu
    )
    assert torch.equal(expected, result[:2])
    assert torch.equal(torch.zeros_like(q[2:]), result[2:])


def test_the_plan_covers_each_row_once():
    """Rows of a sequence that has one row in the step stand alone, others in tiles of at most 32."""
    counts = [1, 70, 1, 2, 1]
    sequence = torch.repeat_interleave(torch.arange(5), torch.tensor(counts)).int()
    rows = AttentionRows(torch.zeros(5, 1, dtype=torch.int32), sequence, torch.zeros(75, dtype=torch.int32))
    plan = rows.to(torch.device("cpu")).plan
    assert plan.singles.tolist() == [[0, 1], [71, 1], [74, 1]]
    assert plan.tiles.tolist() == [[1, 32], [33, 32], [65, 6], [72, 2]]
