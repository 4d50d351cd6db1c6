"""Attention over a latent pool, and its indexer, verify what they read in the pass that reads it."""

import pytest
import torch

from kernels.backend import Backend
from kernels.kv_pool import KvPool
from kernels.kv_write import kv_write
from kernels.page_seal import open_pages
from kernels.seals import SealCheck

SECRET = bytes(range(32))


def sealed(make_latent, backend: Backend, dtype: str):
    """A case of two sequences of 45 and 20 tokens in sealed pages, and what must be expected of them."""
    case = make_latent([45, 20], [45, 20], dtype=dtype, secret=SECRET, backend=backend)
    pool, table = case.pool, case.rows.page_table
    keys = torch.randint(-(2**62), 2**62, tuple(table.shape))
    lengths = (45, 20)
    for sequence, length in enumerate(lengths):
        used = -(-length // 4)
        open_pages(pool, table[sequence, :used].long(), keys[sequence, :used].contiguous(), backend=backend)
        place = torch.arange(length)
        slots = table[sequence, place // 4].long() * 4 + place % 4
        for layer in range(2):
            k, v = torch.randn(length, 1, 32), torch.randn(length, 1, 16)
            kv_write(k, v if layer else None, slots, pool, layer, backend=backend)
    return case, SealCheck(keys, torch.tensor(lengths, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))


def violations(check: SealCheck) -> list[tuple[int, int] | None]:
    """What was found, which is forgotten."""
    found = [check.violation(sequence) for sequence in range(2)]
    check.violations.zero_()
    return found


def flip(pool: KvPool, table: torch.Tensor, sequence: int, position: int, side: str) -> None:
    """One bit of a token's latent vector or of its indexer's key, in layer 1."""
    stored = (pool.k_rows if side == "k" else pool.v)[
        1 if side == "k" else 0, int(table[sequence, position // 4]), 0, position % 4
    ]
    stored.view(torch.uint8)[5] ^= 4


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("rows", [slice(35, 60), [44, 64], [44]], ids=["prompts", "decode", "one"])
def test_attention_verifies_what_it_reads(any_backend, make_latent, dtype, rows):
    """Intact pages pass, whole and still filling; a page with a flipped bit in either stream is named, for its own sequence and no other."""
    case, check = sealed(make_latent, any_backend, dtype)
    case = case.some(rows)
    plain = case.attend(any_backend)
    assert torch.equal(plain, case.attend(any_backend, seal_check=check))
    assert [None, None] == violations(check)
    for side in ("k", "v"):
        flip(case.pool, case.rows.page_table, 0, 22, side)
        case.attend(any_backend, seal_check=check)
        assert [(1, 5), None] == violations(check)
        flip(case.pool, case.rows.page_table, 0, 22, side)
    check.page_keys[0, 11] += 1  # the last page, which has one token
    case.attend(any_backend, seal_check=check)
    assert [(1, 11), None] == violations(check)


def test_selected_attention_verifies_the_pages_that_it_reads(any_backend, make_latent):
    """And no others: what isn't read can't come out."""
    case, check = sealed(make_latent, any_backend, "fp16")
    case = case.some([44, 64])
    selected = torch.tensor([[3, 21, 40], [0, 1, -1]], dtype=torch.int32)
    case.attend(any_backend, selected, seal_check=check)
    assert [None, None] == violations(check)
    flip(case.pool, case.rows.page_table, 0, 22, "k")  # in the page of 21
    case.attend(any_backend, selected, seal_check=check)
    assert [(1, 5), None] == violations(check)
    selected[0, 1] = 19
    case.attend(any_backend, selected, seal_check=check)
    assert [None, None] == violations(check)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("rows", [slice(35, 60), [44, 64], [44]], ids=["prompts", "decode", "one"])
def test_the_indexer_verifies_what_it_reads(any_backend, make_latent, rows, side):
    """Every page of a row with a choice; a row without one reads nothing, and finds nothing."""
    case, check = sealed(make_latent, any_backend, "fp8")
    case = case.some(rows)
    plain = case.choose(any_backend, 6)
    assert torch.equal(plain, case.choose(any_backend, 6, seal_check=check))
    assert [None, None] == violations(check)
    flip(case.pool, case.rows.page_table, 0, 43, side)
    case.choose(any_backend, 6, seal_check=check)
    assert [(1, 10), None] == violations(check)
    case.choose(any_backend, 45, seal_check=check)
    assert [None, None] == violations(check)
