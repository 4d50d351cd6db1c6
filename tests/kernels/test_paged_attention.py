"""Attention over pages against float64, in all layouts, with stale NaN in everything that was not written."""

import pytest
import torch

from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.paged_attention import paged_attention


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize(
    ("kv_heads", "ratio", "dim"), [(3, 3, 64), (1, 1, 8), (2, 7, 24), (8, 1, 8), (1, 4, 80), (1, 2, 256)]
)
def test_layouts(backend, check_close, make_paged, kv_heads, ratio, dim, page_size, dtype):
    """Every page size, head size and ratio of query to kv heads; several sequences at once; prompts and single tokens."""
    case = make_paged(KvLayout(2, 140, kv_heads, dim, page_size, dtype), [1, 17, 63], [1, 17, 5], ratio, backend)
    check_close("paged_attention", case.attend(backend), case.exact())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("length", [127, 128, 129, 300])
def test_several_ranges_of_keys(backend, check_close, make_paged, length, dtype):
    """Sequences that end before, at and after the bounds of the fixed ranges of 128 keys."""
    case = make_paged(KvLayout(1, 40, 3, 64, 16, dtype), [length, 5], [3, 1], 3, backend)
    check_close("paged_attention", case.attend(backend), case.exact())


@pytest.mark.parametrize("window", [1, 2, 16, 100, 128, 129, 1000])
def test_sliding_window(backend, check_close, make_paged, window):
    """A row sees the last `window` keys, its own among them, wherever ranges and tiles begin."""
    case = make_paged(KvLayout(1, 40, 2, 16, 8, "bf16"), [290, 20], [60, 20], 2, backend)
    check_close("paged_attention", case.attend(backend, window=window), case.exact(window))


def test_window_as_long_as_the_sequence_is_none(backend, make_paged):
    """A window that cuts nothing off gives the bits of no window."""
    case = make_paged(KvLayout(1, 40, 2, 16, 8, "bf16"), [290], [40], 2, backend)
    assert torch.equal(case.attend(backend), case.attend(backend, window=290))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_stale_nan_changes_no_bit(backend, make_paged, dtype):
    """For all lengths up to three pages, a pool full of NaN and a pool full of zeros give the same bits."""
    for length in range(1, 13):
        results = []
        for poison in (True, False):
            torch.manual_seed(length)
            layout = KvLayout(2, 16, 2, 16, 4, dtype)
            case = make_paged(layout, [length, 13 - length], [length, 1], 2, backend, poison=poison)
            results.append(case.attend(backend))
        assert torch.equal(results[1], results[0])


def test_large_scores_do_not_overflow(backend, check_close, make_paged):
    """Softmax is of differences to the maximum, also where ranges are merged."""
    case = make_paged(KvLayout(1, 20, 1, 64, 16, "bf16"), [300], [4], 1, backend)
    case.q.mul_(50.0)
    check_close("paged_attention", case.attend(backend), case.exact())


def test_head_scales_are_used_on_both_sides(backend, make_paged):
    """With scales that are powers of two, different for each head, results keep their bits: e4m3 loses nothing to them."""
    results = []
    for exponents in (torch.zeros(2, 4), torch.tensor([[0, 0, 0, 0], [-1, 0, 1, 2]])):
        torch.manual_seed(5)
        scale = (2.0**exponents).float()
        layout = KvLayout(2, 30, 4, 16, 4, "fp8")
        case = make_paged(layout, [60, 9], [8, 9], 2, backend, k_scale=scale, v_scale=scale.flip(1), spread=1.0)
        results.append(case.attend(backend))
    assert torch.equal(results[0], results[1])


def test_scales_belong_to_kv_heads_and_their_side(backend, make_paged):
    """Changing one head's key or value scale changes the result of that head's queries and of no other."""
    case = make_paged(KvLayout(2, 30, 4, 16, 4, "fp8"), [60], [8], 2, backend)
    before = case.attend(backend)
    for scale in (case.pool.k_scale, case.pool.v_scale):
        scale[1, 2] = 3.0
        changed = (case.attend(backend) != before).flatten(2).any(dim=2).all(dim=0)
        assert [False] * 4 + [True] * 2 + [False] * 2 == changed.tolist()
        scale[1, 2] = 1.0
    case.pool.k_scale[0] = 5.0
    assert torch.equal(before, case.attend(backend))


def test_every_stored_code_reads_back(backend):
    """One key has weight 1, so that its value comes out as it was stored: each e4m3 code exactly, NaN codes as NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    pool = KvPool.allocate(KvLayout(1, 1, 1, 256, 1, "fp8"), v_scale=torch.full((1, 1), 2.0**-3))
    pool.v.view(256).copy_(codes)
    rows = AttentionRows(torch.zeros(1, 1, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32))
    y = paged_attention(torch.ones(1, 1, 256), pool, 0, rows, softmax_scale=1.0, backend=backend)
    assert torch.equal((codes.view(torch.float8_e4m3fn).float() / 8).nan_to_num(500), y.view(256).nan_to_num(500))


def test_out_is_written_whole(backend, make_paged, poisoned):
    """A given output is returned and holds what a new one would."""
    case = make_paged(KvLayout(1, 30, 2, 24, 4, "bf16"), [33, 2], [33, 1], 3, backend)
    out = poisoned(*case.q.shape)
    result = paged_attention(
        case.q, case.pool, 0, case.rows, softmax_scale=case.softmax_scale, out=out, backend=backend
    )
    assert out is result
    assert torch.equal(case.attend(backend), result)


def test_no_rows_are_no_error(backend, make_paged):
    """An empty batch gives an empty result."""
    case = make_paged(KvLayout(1, 4, 2, 16, 4, "bf16"), [3], [0], 2, backend)
    assert (0, 4, 16) == tuple(case.attend(backend).shape)
