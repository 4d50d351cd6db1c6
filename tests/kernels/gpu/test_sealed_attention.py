"""Attention that verifies what it reads, interpreted: it finds what the reference finds, and its bits are those without a check."""

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.page_seal import open_pages
from kernels.paged_attention import paged_attention
from kernels.seals import SealCheck

SECRET = bytes(range(32))
LAYER = 1
Found = list[tuple[int, int] | None]


@dataclass(frozen=True)
class SealedCase:
    """Sequences in scattered sealed pages, and queries for the last tokens of each."""

    pool: KvPool
    q: torch.Tensor  # float32 [T, heads, D]
    rows: AttentionRows
    check: SealCheck
    lengths: list[int]

    def attend(
        self, backend: Backend, rows: slice | list[int] | None = None, window: int | None = None, *, checks: bool = True
    ) -> tuple[torch.Tensor, Found]:
        """The result for some or all of the rows, and for each sequence what was found."""
        chosen = slice(None) if rows is None else rows
        some = AttentionRows(
            self.rows.page_table, self.rows.row_sequence[chosen].contiguous(), self.rows.row_position[chosen].contiguous()
        )  # fmt: skip
        check = replace(self.check, violations=torch.zeros_like(self.check.violations)) if checks else None
        result = paged_attention(
            self.q[chosen].contiguous(), self.pool, LAYER, some, softmax_scale=0.2, window=window, seal_check=check, backend=backend,
        )  # fmt: skip
        return result, [None if check is None else check.violation(sequence) for sequence in range(len(self.lengths))]

    def page(self, sequence: int, place: int) -> int:
        """The page at a place of a sequence's table."""
        return int(self.rows.page_table[sequence, place])

    def part(self, side: str, page: int) -> torch.Tensor:
        """The bytes of a page's keys, values or seals in the layer: uint8 [n]."""
        stored = {"k": self.pool.k_rows, "v": self.pool.v, "seal": self.pool.seals.tags}[side]
        return stored[LAYER, page].view(torch.uint8).view(-1)


def make(
    dtype: str,
    page_size: int,
    lengths: list[int],
    asking: list[int],
    *,
    dim: int = 16,
    kv_heads: int = 1,
    ratio: int = 2,
) -> SealedCase:
    """A case in pages that the reference opened and wrote."""
    counts = [-(-length // page_size) for length in lengths]
    layout = KvLayout(2, sum(counts) + 1, kv_heads, dim, page_size, dtype)
    pool = KvPool.allocate(layout, seal_secret=SECRET, backend=Backend.GPU)
    unused = torch.randperm(layout.num_pages, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    keys = torch.randint(-(2**62), 2**62, tuple(table.shape))
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[sequence, :count], unused = unused[:count], unused[count:]
        open_pages(pool, table[sequence, :count].long(), keys[sequence, :count].contiguous(), backend=Backend.REF)
        place = torch.arange(length)
        slots = table[sequence, place // page_size].long() * page_size + place % page_size
        for layer in range(2):
            k, v = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
            kv_write(k, v, slots, pool, layer, backend=Backend.REF)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(asking)).int()
    positions = torch.cat([torch.arange(length - n, length) for length, n in zip(lengths, asking, strict=True)]).int()
    q = torch.randn(len(sequences), kv_heads * ratio, dim)
    check = SealCheck(keys, torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int64))
    return SealedCase(pool, q, AttentionRows(table, sequences, positions), check, lengths)


def agree_on_flips(case: SealedCase, gpu: Backend, num_flips: int, window: int | None = None, seed: int = 0) -> int:
    """Flip random bits one at a time: the kernels find what the reference finds, and other sequences' rows keep their bits. Returns how many were found."""
    plain, nothing = case.attend(gpu, window=window, checks=False)
    checked, found = case.attend(gpu, window=window)
    assert torch.equal(plain, checked)
    assert nothing == found
    generator, num_found = torch.Generator().manual_seed(seed), 0

    def number(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    for flip in range(num_flips):
        sequence = number(len(case.lengths))
        place = number(-(-case.lengths[sequence] // case.pool.layout.page_size))
        part = case.part(("k", "v", "seal")[flip % 3], case.page(sequence, place))
        byte, bit = number(len(part)), number(8)
        part[byte] ^= 1 << bit
        result, found = case.attend(gpu, window=window)
        assert case.attend(Backend.REF, window=window)[1] == found
        assert found[sequence] in (None, (LAYER, place))
        others = case.rows.row_sequence != sequence
        assert torch.equal(plain[others], result[others])
        num_found += found[sequence] is not None
        part[byte] ^= 1 << bit
    assert nothing == case.attend(gpu, window=window)[1]
    return num_found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("asking", [[1, 1], [3, 1], [20, 5]], ids=["decode", "both", "prompts"])
def test_every_flip_is_found(gpu, dtype, asking):
    """In keys, values and seals, in whole pages and in those still filling, slots included that no row sees yet."""
    case = make(dtype, 16, [45, 20], asking, dim=24, kv_heads=2)
    assert 6 == agree_on_flips(case, gpu, 6)


@pytest.mark.parametrize(("page_size", "length"), [(4, 50), (8, 75), (16, 290), (32, 290), (64, 290), (256, 290)])
def test_page_sizes(gpu, page_size, length):
    """Steps of half a page, of one, and of pages too small for them; pages longer than a sequence; several ranges."""
    case = make("fp16", page_size, [length, 33], [1, 1])
    assert 3 == agree_on_flips(case, gpu, 3)


@pytest.mark.parametrize(
    ("page_size", "window", "asking"),
    [(8, 1, [1, 1]), (8, 33, [1, 3]), (16, 33, [1, 3]), (16, 257, [1, 1]), (64, 1, [1, 1]), (64, 33, [1, 3])],
)
def test_windows(gpu, page_size, window, asking):
    """Pages that a row sees a part of are verified whole, those that it doesn't see aren't."""
    case = make("bf16", page_size, [290, 70], asking, ratio=1)
    assert 0 < agree_on_flips(case, gpu, 6, window) < (7 if window == 257 else 6)
    sequence, first = 0, (290 - window) // page_size
    for place, wanted in ((first, (LAYER, first)), (first - 1, None)):
        if place >= 0:
            part = case.part("v", case.page(sequence, place))
            part[0] ^= 1  # the page's first slot
            assert wanted == case.attend(gpu, window=window)[1][sequence]
            part[0] ^= 1


def test_more_query_heads_than_a_program_takes(gpu):
    """Where two programs read for one key head, the pages are verified by others."""
    assert 4 == agree_on_flips(make("fp16", 16, [45, 20], [1, 1], ratio=20), gpu, 4)


def test_a_wrong_reader_is_told(gpu):
    """Another page key, and a row that was never written, for a row alone as for a prompt's."""
    case = make("bf16", 16, [45, 20], [2, 1])
    case.check.page_keys[0, 2] += 1
    case.check.num_tokens[1] += 1
    for rows in (None, [1, 2]):
        assert [(LAYER, 2), (LAYER, 1)] == case.attend(gpu, rows)[1]
    assert [None, (LAYER, 1)] == case.attend(gpu, [2])[1]


def test_rows_alone_in_chunks_and_in_a_batch(gpu):
    """With a check as without: a row's bits are its own, and a fault is found by whatever row reads the page."""
    case = make("fp8", 16, [140, 9, 40], [40, 9, 1], dim=24, ratio=3)
    together, found = case.attend(gpu)
    assert [None, None, None] == found
    for row in (0, 31, 39, 40, 49):
        assert torch.equal(together[row : row + 1], case.attend(gpu, [row])[0])
    case.part("k", case.page(0, 8))[5] ^= 2  # positions 128 to 143
    for rows, is_read in ((None, True), ([39], True), ([26, 27], False), ([27, 28], True), (slice(0, 20), False)):
        assert [(LAYER, 8) if is_read else None, None, None] == case.attend(gpu, rows)[1], rows
    assert torch.equal(together[40:], case.attend(gpu)[0][40:])


def test_the_first_fault_is_kept(gpu):
    """A violation that was noted in an earlier layer is not overwritten."""
    case = make("bf16", 16, [45], [1])
    case.part("k", case.page(0, 1))[0] ^= 1
    check = replace(case.check, violations=torch.tensor([3]))
    paged_attention(case.q, case.pool, LAYER, case.rows, softmax_scale=0.2, seal_check=check, backend=gpu)
    assert [3] == check.violations.tolist()


def test_padding_rows_verify_nothing(gpu):
    """A row at a negative position reads no page, so whatever its sequence's table and keys say is not looked at."""
    case = make("bf16", 16, [45, 20], [1, 1])
    rows = replace(case.rows, row_position=torch.tensor([-1, 19], dtype=torch.int32)).to(torch.device("cpu"))
    check = replace(case.check, page_keys=case.check.page_keys + torch.tensor([[1], [0]]))
    result = paged_attention(case.q, case.pool, LAYER, rows, softmax_scale=0.2, seal_check=check, backend=gpu)
    assert [0, 0] == check.violations.tolist()
    assert torch.equal(case.attend(gpu)[0][1:], result[1:])
    assert not bool(result[0].any())


def test_values_out_of_sight_stay_out_of_the_result(gpu):
    """A value that isn't finite, in a page of which the row sees a later part, is verified and changes nothing."""
    case = make("bf16", 16, [45], [1])
    k, v = torch.zeros(1, 1, 16), torch.full((1, 1, 16), float("inf"))
    open_pages(case.pool, case.rows.page_table[0, 2:3].long(), case.check.page_keys[0, 2:3].contiguous(), backend=gpu)
    page = case.page(0, 2) * 16
    for offset in range(13):
        kv_write(
            k + offset, v if offset == 2 else k + offset, torch.tensor([page + offset]), case.pool, LAYER, backend=gpu
        )
    plain, _ = case.attend(gpu, window=8, checks=False)
    checked, found = case.attend(gpu, window=8)
    assert [None] == found
    assert bool(torch.isfinite(plain).all())
    assert torch.equal(plain, checked)


def test_a_check_that_fits_nothing_is_refused(gpu):
    """A pool without seals, and keys for another table."""
    case = make("bf16", 16, [45], [1])
    plain = KvPool.allocate(case.pool.layout, backend=gpu)
    with pytest.raises(KernelError, match="the pool has no seals to check"):
        replace(case, pool=plain).attend(gpu)
    wider = replace(case.check, page_keys=torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(KernelError, match="page_keys must have shape"):
        replace(case, check=wider).attend(gpu)
