"""The indexer's choice: that of float64 scores, ties by position, nothing from beyond a row, the same in any batch."""

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.indexer_topk import indexer_topk
from kernels.recording import Recording


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(("heads", "dim", "page_size"), [(1, 8, 1), (3, 16, 4), (17, 40, 2), (32, 128, 16)])
def test_choice_is_that_of_exact_scores(backend, make_latent, heads, dim, page_size, dtype):
    """All page sizes and types, prompts and single tokens, fewer positions than wanted, as many, one more and many more."""
    case = make_latent(
        [1, 17, 163], [1, 17, 5], index_heads=heads, index_dim=dim, page_size=page_size, dtype=dtype, scale=0.5
    )
    for count in (1, 16, 17, 40, 200):
        wanted, actual = case.exact_choice(count), case.choose(backend, count)
        # Scores of float32 may swap two that are all but equal.
        differing = sum(len(set(a.tolist()) ^ set(b.tolist())) for a, b in zip(wanted, actual, strict=True))
        assert differing <= 2
        assert bool((actual[actual[:, 0] >= 0].diff(dim=1)[actual[:, 1:] >= 0] > 0).all()) if count > 1 else True


def test_ties_go_by_position(backend, make_latent):
    """Equal scores, zeros among them, are taken from the beginning."""
    case = make_latent([50], [2], index_heads=2)
    case.pool.values_of(1).zero_()
    assert torch.equal(torch.arange(7, dtype=torch.int32).repeat(2, 1), case.choose(backend, 7))
    table, stored = case.rows.page_table[0], case.pool.values_of(1)
    for position in (11, 30, 42):
        stored[int(table[position // 4]), 0, position % 4] = 1.0
    case.index_q.fill_(1.0)
    case.index_weights.fill_(1.0)
    assert [[0, 1, 11, 30, 42]] * 2 == case.choose(backend, 5).tolist()
    assert [[11, 30]] * 2 == case.choose(backend, 2).tolist()
    case.index_weights.fill_(-1.0)
    assert [[0, 1, 2, 3, 4, 5]] * 2 == case.choose(backend, 6).tolist()


def test_rows_that_see_few_positions_get_all(backend, make_latent):
    """Without a look at keys, which may be NaN."""
    case = make_latent([9], [9])
    case.pool.values_of(1).fill_(float("nan"))
    wanted = torch.arange(9).repeat(9, 1).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -1).int()
    assert torch.equal(wanted, case.choose(backend, 9))


def test_a_nan_is_above_all(backend, make_latent):
    """A poisoned key is chosen by the rows that see it, so that the poison shows, and by no other."""
    case = make_latent([60], [20])
    page, offset = int(case.rows.page_table[0, 50 // 4]), 50 % 4
    healthy = case.choose(backend, 8)
    case.pool.values_of(1)[page, 0, offset, 3] = float("nan")
    result = case.choose(backend, 8)
    sees = case.rows.row_position >= 50
    assert bool((result[sees] == 50).any(dim=1).all())
    assert torch.equal(healthy[~sees], result[~sees])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_rows_alone_in_chunks_and_in_a_batch(backend, make_latent, dtype):
    """A row's choice is its own business."""
    case = make_latent([300, 9, 200], [50, 9, 3], dtype=dtype, index_heads=18)
    together = case.choose(backend, 37)
    for row in [*range(0, 62, 7), 49, 50, 59, 61]:
        assert torch.equal(together[row : row + 1], case.some([row]).choose(backend, 37))
    chunks = [case.some(slice(a, b)).choose(backend, 37) for a, b in ((0, 13), (13, 14), (14, 62))]
    assert torch.equal(together, torch.cat(chunks))


def test_threads_and_instruction_sets_change_nothing(on_each_isa, make_latent):
    """Scores have the same bits everywhere: even ties by rounding fall alike."""
    case = make_latent([500], [60], index_heads=20, index_dim=128)
    first, *others = on_each_isa(lambda: case.choose(Backend.CPU, 100)).values()
    for count in (1, 2, 3, 8):
        _native.set_num_threads(count)
        others.append(case.choose(Backend.CPU, 100))
        others.append(torch.cat([case.some([row]).choose(Backend.CPU, 100) for row in range(60)]))
    for other in others:
        assert torch.equal(first, other)


def test_recorded(make_latent):
    """A recorded call computes when it is run, from what its inputs hold then."""
    case, recording, out = make_latent([40], [2]), Recording(), torch.full((2, 5), -7, dtype=torch.int32)
    with recording.record():
        case.choose(Backend.CPU, 5, out=out)
    assert bool((out == -7).all())
    case.index_q.neg_()
    recording.run()
    assert torch.equal(case.choose(Backend.CPU, 5), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 0}, "layer 0 of the pool keeps no indexer's keys"),
        ({"layer": 2}, "layer 2 of the pool keeps no"),
        ({"num_selected": 0}, "num_selected must be positive"),
        ({"q": torch.zeros(2, 3, 8)}, "q must have shape"),
        ({"weights": torch.zeros(2, 4)}, "weights must have shape"),
        ({"out": torch.zeros(2, 5)}, "out must be torch.int32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(backend, make_latent, change, message):
    """What the op can't take is an error that names it."""
    case = make_latent([40], [2])
    given = {
        "q": case.index_q,
        "weights": case.index_weights,
        "pool": case.pool,
        "layer": 1,
        "rows": case.rows,
        "num_selected": 5,
    }
    with pytest.raises(KernelError, match=f"^indexer_topk: .*{message}"):
        indexer_topk(**(given | change), backend=backend)
