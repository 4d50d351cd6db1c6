"""The lease check names the first place of a table that leads to another life of a page."""

import numpy as np
import pytest
import torch

from kernels.lease_check import lease_check, leases_hold

TAGS = torch.tensor([11, 22, 33, -44])


@pytest.mark.parametrize(
    ("table", "expected", "found"),
    [
        ([[0, 1, 3]], [[11, 22, -44]], [-1]),
        ([[0, 1, 3]], [[11, 33, -44]], [1]),
        ([[0, 2, 3]], [[11, 22, 1]], [1]),
        ([[0, 0, 0]], [[11, 0, 0]], [-1]),  # padding is not compared
        ([[1, 1], [2, 0]], [[11, 22], [33, 0]], [0, -1]),
    ],
)
def test_first_wrong_place(any_backend, table, expected, found) -> None:
    """Off by one, another owner's page, padding, several sequences."""
    table = torch.tensor(table, dtype=torch.int32)
    assert found == lease_check(TAGS, table, torch.tensor(expected), backend=any_backend).tolist()


def test_agrees_with_the_reference_on_random_tables(any_backend) -> None:
    """Many sequences, few faults."""
    generator = torch.Generator().manual_seed(0)
    tags = torch.randint(1, 2**62, (500,), generator=generator)
    table = torch.randint(0, 500, (40, 60), generator=generator).to(torch.int32)
    expected = tags[table.long()] ^ (torch.rand(40, 60, generator=generator) < 0.01).long()
    wrong = expected != tags[table.long()]
    assert [int(r.nonzero()[0]) if r.any() else -1 for r in wrong] == lease_check(
        tags, table, expected, backend=any_backend
    ).tolist()


def test_no_sequences_are_no_error(any_backend) -> None:
    """An empty batch."""
    empty = torch.zeros(0, 0, dtype=torch.int32)
    assert [] == lease_check(TAGS, empty, empty.long(), backend=any_backend).tolist()


def test_an_entry_outside_the_pool_is_wrong(any_backend) -> None:
    """It's found like any other, whatever lies there in memory; as padding it's nothing."""
    for page in (4, -1, 2**30):
        table = torch.tensor([[0, page], [page, 1]], dtype=torch.int32)
        assert [1, -1] == lease_check(TAGS, table, torch.tensor([[11, 22], [0, 22]]), backend=any_backend).tolist()


@pytest.mark.parametrize("width", [1, 7])
def test_the_quick_question_has_the_same_answer(backend, width) -> None:
    """Random tables, a few of them with a wrong tag, a place outside the pool or padding there."""
    rng = np.random.default_rng(width)
    tags = rng.integers(1, 2**63, 9, dtype=np.uint64)
    answers = []
    for _ in range(300):
        table = rng.integers(0, 9, (3, width), dtype=np.int32)
        expected = tags[table]
        if rng.random() < 0.5:
            at = rng.integers(3), rng.integers(width)
            expected[at] ^= np.uint64(1 << int(rng.integers(64))) if rng.random() < 0.5 else expected[at]
            table[at] = rng.choice([-1, 9, 2**31 - 1, table[at]])
        tensors = torch.from_numpy(table), torch.from_numpy(expected.view(np.int64))
        found = lease_check(torch.from_numpy(tags.view(np.int64)), *tensors, backend=backend)
        answers.append(leases_hold(tags, *tensors))
        assert bool((found < 0).all()) == answers[-1]
    assert 50 < sum(answers) < 250
