"""What `bench.gpu` checks and times of seals: writes that keep them, attention that verifies what it reads, whole pages verified."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.gpu_cases import GPU, PAGE, TOLERANCES, Case, Sizes
from kernels.kv_pool import AttentionRows, KvDtype, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.page_seal import open_pages, verify_pages
from kernels.paged_attention import paged_attention
from kernels.seals import SealCheck

SECRET = bytes(range(32))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A pool whose pages are all full and sealed: `num_sequences` of them, one after the other."""

    pool: KvPool
    page_keys: torch.Tensor  # int64 [num_pages]
    num_sequences: int

    @property
    def num_tokens(self) -> torch.Tensor:
        """In each page: int64 [num_pages]."""
        return torch.full_like(self.page_keys, PAGE)

    def verified(self) -> torch.Tensor:
        """The first wrong layer of each page, or -1."""
        pages = torch.arange(len(self.page_keys), device=self.page_keys.device)
        return verify_pages(self.pool, pages, self.page_keys, self.num_tokens, backend=GPU)

    def attend(self, q: torch.Tensor, *, checks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The last rows of each sequence, as many for each: float32 [T, heads, D], and int64 [num_sequences], what was found."""
        pages = len(self.page_keys) // self.num_sequences
        count = len(q) // self.num_sequences
        rows = AttentionRows(
            torch.arange(len(self.page_keys), dtype=torch.int32).view(-1, pages),
            torch.arange(self.num_sequences, dtype=torch.int32).repeat_interleave(count),
            torch.arange(pages * PAGE - count, pages * PAGE, dtype=torch.int32).repeat(self.num_sequences),
        ).to(q.device)
        check = SealCheck(
            self.page_keys.view(-1, pages),
            torch.full((self.num_sequences,), pages * PAGE, dtype=torch.int32, device=q.device),
            torch.zeros(self.num_sequences, dtype=torch.int64, device=q.device),
        )
        call = functools.partial(paged_attention, q, self.pool, 0, rows, softmax_scale=q.shape[2] ** -0.5, backend=GPU)
        return call(seal_check=check if checks else None), check.violations

    def flip(self) -> None:
        """A bit of a value in the middle of the last sequence."""
        page = len(self.page_keys) - len(self.page_keys) // self.num_sequences // 2 - 1
        self.pool.v[0, page].view(torch.uint8).view(-1)[5] ^= 4


def sealed(sizes: Sizes, dtype: KvDtype, num_sequences: int, device: torch.device) -> Sealed:
    """Random numbers, written by the kernel."""
    torch.manual_seed(0)
    num_pages = num_sequences * -(-sizes.context // PAGE)
    layout = KvLayout(1, num_pages, sizes.kv_heads, sizes.head_dim, PAGE, dtype)
    pool = KvPool.allocate(layout, seal_secret=SECRET, backend=GPU)
    keys = torch.randint(-(2**62), 2**62, (num_pages,)).to(device)
    open_pages(pool, torch.arange(num_pages, device=device), keys, backend=GPU)
    slots = torch.arange(num_pages * PAGE, device=device)
    for some in torch.split(slots, 1 << 14):
        k, v = torch.randn(2, len(some), sizes.kv_heads, sizes.head_dim).to(device)
        kv_write(k, v, some, pool, 0, backend=GPU)
    return Sealed(pool, keys, num_sequences)


def seal_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """For pages of words and of bytes: bfloat16 is one more kind of word."""
    for dtype in ("fp16", "fp8"):
        for num_sequences, rows in ((1, 1), (sizes.streams, 1), (1, min(256, sizes.context))):
            yield _attention(sealed(sizes, dtype, num_sequences, device), sizes, rows, device)
        pages = sealed(sizes, dtype, sizes.streams, device)
        yield Case(
            name=f"verify_pages {dtype}, {len(pages.page_keys)} pages",
            tolerance=TOLERANCES["bytes"],
            num_bytes=pages.pool.nbytes,
            run=pages.verified,
            error=functools.partial(_missed_by_pages, pages),
            has_same_bits=lambda: True,
        )
        yield _write(sizes, dtype, device)


def _attention(case: Sealed, sizes: Sizes, rows: int, device: torch.device) -> Case:
    q = torch.randn(case.num_sequences * rows, sizes.heads, sizes.head_dim).to(device)
    kind = "decode" if rows == 1 else "prefill"
    return Case(
        name=f"verified attention {kind} {case.pool.layout.dtype}, {case.num_sequences} sequences at {sizes.context}",
        tolerance=TOLERANCES["bytes"],
        num_bytes=case.pool.nbytes + 2 * q.nbytes,
        run=functools.partial(case.attend, q, checks=True),
        error=functools.partial(_missed_by_attention, case, q),
        has_same_bits=lambda: torch.equal(case.attend(q, checks=True)[0], case.attend(q, checks=False)[0]),
    )


def _missed_by_attention(case: Sealed, q: torch.Tensor) -> float:
    """0 if sound pages pass and a flipped bit is found, in its sequence only."""
    sound = case.attend(q, checks=True)[1].tolist()
    case.flip()
    found = case.attend(q, checks=True)[1].tolist()
    case.flip()
    return float(any(sound) or any(found[:-1]) or not found[-1])


def _missed_by_pages(case: Sealed) -> float:
    """0 if sound pages pass, and one flipped bit spoils one page."""
    sound = int((case.verified() >= 0).sum())
    case.flip()
    found = int((case.verified() >= 0).sum())
    case.flip()
    return float(sound != 0 or found != 1)


def _write(sizes: Sizes, dtype: KvDtype, device: torch.device) -> Case:
    """The first row of each of some pages."""
    rows = sizes.streams
    small = Sizes(sizes.hidden, sizes.ffn, sizes.heads, sizes.kv_heads, sizes.head_dim, context=rows * PAGE)
    case = sealed(small, dtype, 1, device)
    x, slots = torch.randn(rows, sizes.kv_heads, sizes.head_dim).to(device), torch.arange(rows, device=device) * PAGE

    def error() -> float:
        open_pages(case.pool, slots // PAGE, case.page_keys, backend=GPU)
        kv_write(x, x, slots, case.pool, 0, backend=GPU)
        pages = torch.arange(rows, device=device)
        return float((verify_pages(case.pool, pages, case.page_keys, torch.ones_like(pages), backend=GPU) >= 0).sum())

    return Case(
        name=f"kv_write sealed {dtype}, {rows} rows",
        tolerance=TOLERANCES["bytes"],
        num_bytes=2 * x.nbytes + 4 * rows * sizes.kv_heads * sizes.head_dim * case.pool.layout.element_bytes,
        run=functools.partial(kv_write, x, x, slots, case.pool, 0, backend=GPU),
        error=error,
        has_same_bits=lambda: True,
    )
