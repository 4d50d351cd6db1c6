"""Latent attention over pages against float64, with stale NaN in everything that was not written; and the same bits in any batch."""

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.kv_pool import KvLayout, KvPool
from kernels.mla_attention import mla_attention
from kernels.recording import Recording

DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
SIZES = [
    (1, 8, 8, 1),
    (5, 24, 8, 4),
    (16, 40, 24, 2),
    (17, 64, 16, 16),
    (70, 32, 16, 8),
    (3, 512, 64, 16),
    (2, 16, 0, 4),
]


@DTYPES
@pytest.mark.parametrize(("heads", "latent", "rope", "page_size"), SIZES)
def test_layouts(backend, check_close, make_latent, random_choice, heads, latent, rope, page_size, dtype):
    """Every page size and type; one head and more than a tile of them; prompts and single tokens; all positions and selected ones."""
    case = make_latent(
        [1, 17, 63], [1, 17, 5], heads=heads, latent=latent, rope=rope, page_size=page_size, dtype=dtype, scale=0.5
    )
    check_close("mla_attention", case.attend(backend), case.exact())
    selected = random_choice(case, 9)
    check_close("mla_attention", case.attend(backend, selected), case.exact(selected))


@DTYPES
@pytest.mark.parametrize("length", [127, 128, 129, 300])
def test_several_ranges_of_keys(backend, check_close, make_latent, random_choice, length, dtype):
    """Sequences, and selections, that end before, at and after the bounds of the fixed ranges of 128 keys."""
    case = make_latent([length, 5], [3, 1], dtype=dtype)
    check_close("mla_attention", case.attend(backend), case.exact())
    selected = random_choice(case, length - 2)
    check_close("mla_attention", case.attend(backend, selected), case.exact(selected))


def test_several_spans_of_ranges(backend, check_close, make_latent):
    """More keys than are merged at a time, rows on both sides of a bound: exact, and the same bits alone as in a prompt's chunk."""
    case = make_latent([1030, 2060, 9], [12, 2, 1], page_size=16)
    together = case.attend(backend)
    check_close("mla_attention", together, case.exact())
    for row in (0, 5, 6, 11, 13, 14):
        assert torch.equal(together[row : row + 1], case.some([row]).attend(backend))
    selected = torch.arange(1018, dtype=torch.int32).repeat(15, 1) + torch.arange(15, dtype=torch.int32)[:, None]
    selected[selected > case.rows.row_position[:, None]] = -1
    check_close("mla_attention", case.attend(backend, selected), case.exact(selected))


def test_all_positions_selected_are_no_selection(backend, make_latent):
    """Ranges are of those selected: a selection of everything gives the bits of none."""
    case = make_latent([300, 9], [20, 9])
    selected = torch.arange(301, dtype=torch.int32).repeat(29, 1)
    assert torch.equal(case.attend(backend), case.attend(backend, selected))
    selected[selected > case.rows.row_position[:, None]] = -1
    assert torch.equal(case.attend(backend), case.attend(backend, selected))


def test_a_row_with_nothing_selected_is_zero(backend, make_latent):
    """And harms no other row, alone or in a batch."""
    case = make_latent([30, 9], [3, 1])
    selected = torch.tensor([[0, 4, 7], [-1, 3, 4], [29, -1, -1], [9, -1, -1]], dtype=torch.int32)
    result = case.attend(backend, selected)
    assert not bool(result[[1, 3]].any())
    check = torch.tensor([[0, 4, 7], [-1, -1, -1], [29, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    assert torch.equal(result, case.attend(backend, check))
    assert torch.equal(result[1:2], case.some([1]).attend(backend, selected[1:2]))
    assert bool(torch.isfinite(result).all())


@DTYPES
def test_stale_nan_changes_no_bit(backend, make_latent, dtype):
    """For all lengths up to three pages, a pool full of NaN and a pool full of zeros give the same bits."""
    for length in range(1, 13):
        results = []
        for poison in (True, False):
            torch.manual_seed(length)
            case = make_latent([length, 13 - length], [length, 1], dtype=dtype, poison=poison)
            results.append(case.attend(backend))
        assert torch.equal(results[1], results[0])


def test_large_scores_do_not_overflow(backend, check_close, make_latent):
    """Softmax is of differences to the maximum, also where ranges are merged."""
    case = make_latent([300], [4])
    case.q_latent.mul_(25.0)
    check_close("mla_attention", case.attend(backend), case.exact())


def test_scores_of_minus_infinity(backend, make_latent):
    """Where every score of a range of keys overflows downwards, a row alone and in a batch still agree, and other keys decide."""
    case = make_latent([300], [100], heads=1, page_size=16)
    case.pool.k_rows[1, case.rows.page_table[0, :8].long(), 0, :, :8] = -1e38
    case.q_latent.abs_().mul_(40)
    together = case.attend(backend)
    assert bool(torch.isfinite(together).all())
    assert torch.equal(together[99:], case.some([99]).attend(backend))


@pytest.mark.parametrize("side", ["q_latent", "q_rope", "keys"])
def test_a_sequence_with_nan_harms_no_other(backend, make_latent, side):
    """NaN in a query, or in a latent vector of one sequence, ends in that sequence's rows only."""
    case = make_latent([150, 140, 20], [3, 3, 3])
    healthy = case.attend(backend)
    if side == "keys":
        case.pool.k_rows[1, int(case.rows.page_table[1, 0]), 0, 2, 3] = float("nan")
    else:
        getattr(case, side)[4, 0, 0] = float("nan")
    result = case.attend(backend)
    others = [0, 1, 2, 6, 7, 8]
    assert torch.equal(healthy[others], result[others])
    assert bool(torch.isnan(result[4]).any())


@pytest.fixture(params=[("bf16", None), ("fp8", None), ("fp16", 140)], ids=["bf16", "fp8", "fp16-selected"])
def batch(request: pytest.FixtureRequest, make_latent, random_choice):
    """Rows of three sequences, two of them longer than a range of keys, once one longer than a span: (case, what is selected or None)."""
    dtype, count = request.param
    lengths = [1100 if dtype == "fp8" else 300, 9, 200]
    case = make_latent(lengths, [150, 9, 3], dtype=dtype, heads=17)
    return case, None if count is None else random_choice(case, count)


def attend(case, selected, backend, rows=slice(None)) -> torch.Tensor:
    """The result for some rows."""
    return case.some(rows).attend(backend, None if selected is None else selected[rows])


def test_rows_alone_and_in_a_batch(backend, batch):
    """A token's attention has the same bits computed alone (decode) as with its whole prompt and with other sequences."""
    together = attend(*batch, backend)
    for row in [*range(0, 162, 13), 149, 150, 158, 159, 161]:
        assert torch.equal(together[row : row + 1], attend(*batch, backend, [row]))


@pytest.mark.parametrize("sizes", [[1, 161], [7, 8, 9, 138], [100, 62], [149, 2, 11]], ids=str)
def test_chunks(backend, batch, sizes):
    """Chunks of a prompt, wherever they are cut, give the bits of the whole."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    chunks = [attend(*batch, backend, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    assert torch.equal(attend(*batch, backend), torch.cat(chunks))


def test_threads_change_no_bit(batch):
    """A long stream alone, whose ranges threads share, and a batch have the same bits on each number of threads."""
    for rows in ([149], slice(None)):
        results = []
        for count in (1, 2, 3, 8):
            _native.set_num_threads(count)
            results.append(attend(*batch, Backend.CPU, rows))
        for other in results[1:]:
            assert torch.equal(results[0], other)


def test_instruction_sets_change_no_bit(on_each_isa, batch):
    """Portable code, AVX2 and AVX-512 give the same bits."""
    first, *others = on_each_isa(lambda: attend(*batch, Backend.CPU)).values()
    for other in others:
        assert torch.equal(first, other)


def test_rows_may_lie_apart(backend, make_latent):
    """Queries may be parts of wider tensors."""
    case = make_latent([40], [7])
    wide = torch.randn(7, 5 * 24 + 5 * 8 + 3)
    wide[:, :120], wide[:, 120:160] = case.q_latent.flatten(1), case.q_rope.flatten(1)
    parts = wide[:, :120].unflatten(1, (5, 24)), wide[:, 120:160].unflatten(1, (5, 8))
    result = mla_attention(*parts, case.pool, 1, case.rows, softmax_scale=0.17, backend=backend)
    assert torch.equal(case.attend(backend), result)


def test_recorded(make_latent, poisoned):
    """A recorded call computes when it is run, from what its inputs hold then."""
    case, recording = make_latent([40], [2]), Recording()
    out, selected = poisoned(2, 5, 24), torch.tensor([[3, 5], [0, 1]], dtype=torch.int32)
    with recording.record():
        case.attend(Backend.CPU, selected, out=out)
    assert bool(torch.isnan(out).all())
    selected[0, 1] = 30
    recording.run()
    assert torch.equal(case.attend(Backend.CPU, selected), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_latent": torch.zeros(2, 5, 40)}, "keys of 40 elements or more"),
        ({"q_rope": torch.zeros(2, 5, 4)}, "q_rope must have shape"),
        ({"q_rope": torch.zeros(2, 4, 8)}, "q_rope must have shape"),
        ({"layer": 2}, "layer must be in"),
        ({"selected": torch.zeros(2, 3)}, "selected must be torch.int32"),
        ({"selected": torch.zeros(1, 3, dtype=torch.int32)}, "selected must have shape"),
        ({"pool": KvPool.allocate(KvLayout(2, 20, 1, 32, 4, "bf16"))}, "must be a latent one"),
        ({"out": torch.zeros(2, 5, 8)}, "out must have shape"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(backend, make_latent, change, message):
    """What the op can't take is an error that names it."""
    case = make_latent([40], [2])
    given = {"q_latent": case.q_latent, "q_rope": case.q_rope, "pool": case.pool, "layer": 1, "rows": case.rows}
    with pytest.raises(KernelError, match=f"^mla_attention: .*{message}"):
        mla_attention(**(given | change), softmax_scale=1.0, backend=backend)


def test_no_rows_are_no_error(backend, make_latent):
    """An empty batch gives an empty result."""
    assert (0, 5, 24) == tuple(make_latent([3], [0]).attend(backend).shape)
