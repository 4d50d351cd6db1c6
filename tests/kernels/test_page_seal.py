"""Seals are what the construction says, follow every write, and notice every kind of change."""

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.page_seal import open_pages, rekey_pages, verify_pages
from kernels.page_seal.ref import seal_ref
from kernels.paged_attention import paged_attention
from kernels.seals import PageSeals, SealCheck, SealKeys

SECRET = bytes(range(32))
PAGE_KEYS = torch.tensor([3, -(2**62) + 5, 2**63 - 1, 0, 77, 1234567, 99])

LAYOUTS = [
    KvLayout(2, 7, 3, 64, 16, "bf16"), KvLayout(2, 7, 3, 64, 16, "fp16"), KvLayout(2, 7, 3, 64, 16, "fp8"),
    KvLayout(3, 7, 1, 24, 2, "fp8"), KvLayout(1, 7, 2, 8, 1, "bf16"), KvLayout(2, 7, 2, 128, 64, "fp8"),
    KvLayout(1, 7, 1, 40, 8, "fp16"),
    KvLayout(2, 7, 1, 72, 16, "fp16", 0, is_latent=True), KvLayout(3, 7, 1, 40, 4, "fp8", 24, (0, 2), is_latent=True),
    KvLayout(2, 7, 1, 576, 1, "bf16", 128, (1,), is_latent=True), KvLayout(2, 7, 2, 16, 4, "bf16", 24),
]  # fmt: skip
EACH_LAYOUT = pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda x: f"{'latent-' * x.is_latent}{x.dtype}-{x.num_kv_heads}x{x.head_dim}+{x.v_dim}-{x.page_size}",
)


def sealed_pool(layout: KvLayout, backend: Backend) -> KvPool:
    """A pool whose pages are open under PAGE_KEYS, with scales that differ by layer and head."""
    scales = 1 + torch.rand(layout.num_layers, layout.num_kv_heads)
    pool = KvPool.allocate(layout, scales, scales.flip(0) / 2, SECRET)
    pool.stored_k.view(torch.uint8).fill_(0x55)
    pool.v.view(torch.uint8).fill_(0x55)
    open_pages(pool, torch.arange(7), PAGE_KEYS, backend=backend)
    return pool


def write(pool: KvPool, slots: torch.Tensor, backend: Backend) -> None:
    """Random rows at slots in all layers."""
    for layer in range(pool.layout.num_layers):
        k, v = (
            torch.randn(len(slots), pool.layout.num_kv_heads, n) * 100
            for n in (pool.layout.head_dim, pool.layout.v_dim)
        )
        kv_write(k, None if pool.values_of(layer) is None else v, slots, pool, layer, backend=backend)


def filled_pool(layout: KvLayout, backend: Backend) -> KvPool:
    """Page i has i * page_size // 6 rows, the last page all of them."""
    pool = sealed_pool(layout, backend)
    size = layout.page_size
    slots = torch.tensor([page * size + offset for page in range(7) for offset in range(page * size // 6)])
    write(pool, slots[torch.randperm(len(slots))], backend)
    return pool


def counts(layout: KvLayout) -> torch.Tensor:
    """How many rows the pages of a filled pool have."""
    return torch.arange(7) * layout.page_size // 6


def verify(
    pool: KvPool, backend: Backend, keys: torch.Tensor = PAGE_KEYS, num: torch.Tensor | None = None
) -> list[int]:
    """The first wrong layer of each page."""
    num = counts(pool.layout) if num is None else num
    return verify_pages(pool, torch.arange(7), keys, num, backend=backend).tolist()


@EACH_LAYOUT
def test_seals_are_those_of_the_reference(backend, layout) -> None:
    """After writes in any order, one row at a time or many, each tag is what the bytes give by plain torch."""
    pool = filled_pool(layout, backend)
    expected = torch.stack(
        [seal_ref(pool, pool.seals, p, PAGE_KEYS[p], int(counts(layout)[p])) for p in range(7)], dim=1
    )
    assert torch.equal(expected, pool.seals.tags)
    assert [-1] * 7 == verify(pool, backend)


@EACH_LAYOUT
def test_open_pages_are_zero(backend, layout) -> None:
    """What a page held before is gone when it's opened."""
    pool = sealed_pool(layout, backend)
    assert not bool(pool.stored_k.view(torch.uint8).any())
    assert not bool(pool.v.view(torch.uint8).any())
    assert [-1] * 7 == verify(pool, backend, num=torch.zeros(7, dtype=torch.int64))


def num_flips(backend: Backend) -> int:
    """For each layout and side: over 10,000 in all with vector instructions, fewer where each takes longer."""
    if backend is Backend.REF:
        return 30
    from kernels import _native

    return 300 if _native.selected() == "portable" else 1700


@pytest.mark.parametrize(
    "layout", [*LAYOUTS[1:4], *LAYOUTS[7:9]], ids=lambda x: f"{'latent-' * x.is_latent}{x.dtype}-{x.v_dim}"
)
def test_every_single_bit_is_covered(backend, layout) -> None:
    """A flipped bit anywhere in keys or values, rows that aren't written included, is found, in its page and layer."""
    pool = filled_pool(layout, backend)
    generator = torch.Generator().manual_seed(5)
    with_values = [layer for layer in range(layout.num_layers) if pool.values_of(layer) is not None]
    for side, layers in ((pool.stored_k, range(layout.num_layers)), (pool.v, with_values)):
        stored = side.view(torch.uint8).flatten(2)
        for _ in range(num_flips(backend) if layers else 0):
            index, page, byte, bit = (int(torch.randint(n, (), generator=generator)) for n in (*stored.shape, 8))
            stored[index, page, byte] ^= 1 << bit
            assert layers[index] == verify(pool, backend)[page]
            stored[index, page, byte] ^= 1 << bit
    assert [-1] * 7 == verify(pool, backend)


def test_tags_and_scales_are_covered(backend) -> None:
    """A flipped bit in a tag, in a key scale or in a value scale."""
    layout = LAYOUTS[2]
    pool = filled_pool(layout, backend)
    for bit in range(64):
        pool.seals.tags[1, 4, 2] ^= (1 << bit) if bit < 63 else -(2**63)
        assert [-1, -1, -1, -1, 1, -1, -1] == verify(pool, backend)
        pool.seals.tags[1, 4, 2] ^= (1 << bit) if bit < 63 else -(2**63)
    for scale in (pool.k_scale, pool.v_scale):
        for bit in range(32):
            scale.view(torch.int32)[1, 0] ^= (1 << bit) if bit < 31 else -(2**31)
            assert [1] * 7 == verify(pool, backend)
            scale.view(torch.int32)[1, 0] ^= (1 << bit) if bit < 31 else -(2**31)


@EACH_LAYOUT
def test_a_wrong_reader_finds_no_seal(backend, layout) -> None:
    """Another page key, as another namespace, prefix, place or life of the page gives, and another number of rows."""
    pool = filled_pool(layout, backend)
    assert [0] * 7 == verify(pool, backend, keys=PAGE_KEYS ^ 1)
    assert [0] * 7 == verify(pool, backend, keys=PAGE_KEYS ^ (1 << 40))
    assert [0] * 7 == verify(pool, backend, keys=PAGE_KEYS.roll(1))
    num = counts(layout)
    other = torch.where(num > 0, num - 1, num + 1)
    assert [0] * 7 == verify(pool, backend, num=other)


def test_swaps_are_found(backend) -> None:
    """Two pages with their tags, two heads, two layers, two slots, keys against values."""
    layout = LAYOUTS[1]

    def pages(pool: KvPool) -> None:
        for part in (pool.k, pool.v, pool.seals.tags):
            part[:, [5, 6]] = part[:, [6, 5]]

    def heads(pool: KvPool) -> None:
        for part in (pool.k, pool.v, pool.seals.tags):
            part[:, :, [0, 2]] = part[:, :, [2, 0]]

    def layers(pool: KvPool) -> None:
        for part in (pool.k, pool.v, pool.seals.tags):
            part[[0, 1]] = part[[1, 0]]

    def slots(pool: KvPool) -> None:
        pool.k[:, 6, :, :, [3, 4]] = pool.k[:, 6, :, :, [4, 3]]
        pool.v[:, 6, :, [3, 4]] = pool.v[:, 6, :, [4, 3]]

    def sides(pool: KvPool) -> None:
        k, v = pool.k_rows[:, 6].clone(), pool.v[:, 6].clone()
        pool.k_rows[:, 6], pool.v[:, 6] = v, k

    for swap in (pages, heads, layers, slots, sides):
        pool = filled_pool(layout, backend)
        swap(pool)
        assert 0 == verify(pool, backend)[6], swap.__name__


def test_a_missing_row_is_found(backend) -> None:
    """A row that should have been written and wasn't, even one of zeros."""
    pool = sealed_pool(LAYOUTS[1], backend)
    zeros = torch.zeros(2, 3, 64)
    for layer in range(2):
        kv_write(zeros, zeros, torch.tensor([0, -1]), pool, layer, backend=backend)
    assert -1 == verify(pool, backend, num=torch.tensor([1, 0, 0, 0, 0, 0, 0]))[0]
    assert 0 == verify(pool, backend, num=torch.tensor([2, 0, 0, 0, 0, 0, 0]))[0]


def test_rekeyed_pages_verify_under_the_new_key_only(backend) -> None:
    """Whatever they hold; a page whose seal was wrong has a wrong one afterwards."""
    pool = filled_pool(LAYOUTS[2], backend)
    pool.k.view(-1)[0] ^= 1  # page 0
    new = PAGE_KEYS * 31 + 7
    rekey_pages(pool, torch.arange(7), PAGE_KEYS, new, backend=backend)
    assert [0] + [-1] * 6 == verify(pool, backend, keys=new)
    assert [0] * 7 == verify(pool, backend)


def attend(pool: KvPool, lengths: list[int], queries: list[int], keys: torch.Tensor, backend: Backend):
    """Attention over layer 1 of the first pages of each sequence, with a check: (result, violations)."""
    size = pool.layout.page_size
    places, table, page = -(-max(lengths) // size), [], 0
    for length in lengths:
        own = list(range(page, page + -(-length // size)))
        page += len(own)
        table.append(own + [0] * (places - len(own)))
    page_table = torch.tensor(table, dtype=torch.int32)
    check = SealCheck(
        keys[page_table.long()], torch.tensor(lengths, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int64)
    )
    rows = AttentionRows(
        page_table,
        torch.tensor([i for i, n in enumerate(queries) for _ in range(n)], dtype=torch.int32),
        torch.tensor(
            [p for length, n in zip(lengths, queries, strict=True) for p in range(length - n, length)],
            dtype=torch.int32,
        ),
    )
    q = torch.randn(len(rows.row_sequence), 6, pool.layout.head_dim, generator=torch.Generator().manual_seed(1))
    plain = paged_attention(q, pool, 1, rows, softmax_scale=0.1, backend=backend)
    checked = paged_attention(q, pool, 1, rows, softmax_scale=0.1, seal_check=check, backend=backend)
    assert torch.equal(plain, checked)
    return checked, [check.violation(i) for i in range(len(lengths))]


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda x: x.dtype)
@pytest.mark.parametrize("queries", [[1, 1], [20, 1], [33, 15]], ids=str)
def test_attention_verifies_what_it_reads(backend, layout, queries) -> None:
    """Intact pages pass, whole and still filling; a page with a flipped bit is named, for its own sequence and no other."""
    pool = sealed_pool(layout, backend)
    lengths = [45, 20]  # pages 0-2 and 3-4
    write(pool, torch.tensor([*range(45), *range(48, 68)]), backend)
    sound, found = attend(pool, lengths, queries, PAGE_KEYS, backend)
    assert [None, None] == found
    pool.v.view(torch.uint8)[1, 4, 2, 1, 3] ^= 4
    damaged, found = attend(pool, lengths, queries, PAGE_KEYS, backend)
    assert [None, (1, 1)] == found
    assert torch.equal(sound[: queries[0]], damaged[: queries[0]])
    pool.v.view(torch.uint8)[1, 4, 2, 1, 3] ^= 4
    keys = PAGE_KEYS.clone()
    keys[2] += 1
    assert [(1, 2), None] == attend(pool, lengths, queries, keys, backend)[1]


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda x: x.dtype)
def test_attention_names_any_page_of_a_long_table(backend, layout, queries) -> None:
    """Pages that are summed up together, and those that are left over: a flipped bit of either side is put down to its own page."""
    pool = sealed_pool(layout, backend)
    write(pool, torch.arange(105), backend)
    assert [None] == attend(pool, [105], [queries], PAGE_KEYS, backend)[1]
    for page in range(7):
        for side in (pool.k, pool.v):
            part = side[1, page, page % 3].view(-1).view(torch.uint8)
            at = 37 * page % len(part)
            part[at] ^= 128  # no finite number becomes a NaN by it
            assert [(1, page)] == attend(pool, [105], [queries], PAGE_KEYS, backend)[1]
            part[at] ^= 128


def test_instruction_sets_agree_on_seals(on_each_isa) -> None:
    """All of them make the same tags."""

    def tags() -> torch.Tensor:
        torch.manual_seed(3)
        return filled_pool(LAYOUTS[2], Backend.CPU).seals.tags

    first, *others = on_each_isa(tags).values()
    assert all(torch.equal(first, other) for other in others)


def test_keys_depend_on_the_secret_and_nothing_else() -> None:
    """The same secret gives the same keys; another one gives others everywhere; factors are odd."""
    layout = LAYOUTS[0]
    a, b, c = (SealKeys.derive(secret, layout) for secret in (SECRET, SECRET, SECRET[::-1]))
    for name in ("k_words", "v_words", "rows", "factor", "offset", "scales"):
        assert torch.equal(getattr(a, name), getattr(b, name))
        assert not torch.equal(getattr(a, name), getattr(c, name))
    assert bool((a.factor & 1).all())
    assert bool((a.scales & 1).all())
    assert 0 < PageSeals.allocate(SECRET, layout).tags.nbytes < 0.005 * 7 * layout.page_bytes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool, b: open_pages(pool, torch.tensor([7]), torch.tensor([1]), backend=b), "pages name one outside"),
        (lambda pool, b: open_pages(pool, torch.tensor([1]), torch.tensor([1, 2]), backend=b), "page_keys"),
        (lambda pool, b: rekey_pages(pool, torch.tensor([-1]), torch.tensor([1]), torch.tensor([1]), backend=b), "pages"),
        (lambda pool, b: verify_pages(pool, torch.tensor([1]), torch.tensor([1]), torch.tensor([17]), backend=b), "num_tokens"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(backend, call, message) -> None:
    """Pages outside the pool, shapes that don't fit, more rows than a page holds."""
    with pytest.raises(KernelError, match=message):
        call(sealed_pool(LAYOUTS[0], backend), backend)


def test_what_cannot_be_sealed_is_refused(backend) -> None:
    """A pool without seals, a short secret, fp8 pages of one token."""
    plain = KvPool.allocate(LAYOUTS[0])
    with pytest.raises(KernelError, match="the pool has no seals"):
        open_pages(plain, torch.tensor([1]), torch.tensor([1]), backend=backend)
    with pytest.raises(KernelError, match="32 bytes"):
        SealKeys.derive(b"short", LAYOUTS[0])
    with pytest.raises(KernelError, match="even number"):
        SealKeys.derive(SECRET, KvLayout(1, 1, 1, 8, 1, "fp8"))
