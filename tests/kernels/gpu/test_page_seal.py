"""Seals on GPUs, interpreted: the reference's bits after any writes, and every kind of change found."""

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.kv_pool import KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.page_seal import open_pages, rekey_pages, verify_pages

SECRET = bytes(range(32))
PAGES = 6
KEYS = torch.tensor([3, -(2**62) + 5, 2**63 - 1, 0, 77, -1])
LAYOUTS = [
    KvLayout(2, PAGES, 2, 24, 8, "bf16"), KvLayout(2, PAGES, 1, 16, 16, "fp16"), KvLayout(2, PAGES, 3, 8, 4, "fp8"),
    KvLayout(1, PAGES, 1, 16, 1, "bf16"), KvLayout(1, PAGES, 2, 16, 4, "fp16", 24),
    KvLayout(2, PAGES, 1, 24, 8, "fp16", 0, is_latent=True), KvLayout(3, PAGES, 1, 40, 4, "fp8", 24, (0, 2), is_latent=True),
    KvLayout(2, PAGES, 1, 24, 1, "bf16", 8, (1,), is_latent=True),
]  # fmt: skip
EACH_LAYOUT = pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda x: f"{'latent-' * x.is_latent}{x.dtype}-{x.num_kv_heads}x{x.head_dim}+{x.v_dim}-{x.page_size}",
)


def sealed_pool(layout: KvLayout, backend: Backend) -> KvPool:
    """A pool for a GPU whose pages are open, after having held something else, with scales that differ by layer and head."""
    scales = 1 + torch.arange(layout.num_layers * layout.num_kv_heads).view(-1, layout.num_kv_heads) / 7
    pool = KvPool.allocate(layout, scales, scales.flip(0) / 2, SECRET, Backend.GPU)
    for side in (pool.stored_k, pool.v):
        side.view(torch.uint8).fill_(0x55)
    open_pages(pool, torch.arange(layout.num_pages), keys(layout), backend=backend)
    return pool


def keys(layout: KvLayout) -> torch.Tensor:
    """Of all pages."""
    return KEYS.repeat(-(-layout.num_pages // PAGES))[: layout.num_pages]


def counts(layout: KvLayout) -> torch.Tensor:
    """How many rows the pages of a filled pool have: none, some, or all."""
    return torch.arange(layout.num_pages) % PAGES * layout.page_size // (PAGES - 1)


def fill(pool: KvPool, backend: Backend) -> None:
    """Rows in all layers, in any order, one of which is skipped."""
    layout, size = pool.layout, pool.layout.page_size
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([page * size + s for page, count in enumerate(counts(layout).tolist()) for s in range(count)])
    slots = torch.cat([slots[torch.randperm(len(slots), generator=generator)], torch.tensor([-1])])
    for layer in range(layout.num_layers):
        k, v = (
            torch.randn(len(slots), layout.num_kv_heads, n, generator=generator) * 100
            for n in (layout.head_dim, layout.v_dim)
        )
        for some in (slice(0, 7), slice(7, None)):  # two calls, so that a page is written to in both
            value = None if pool.values_of(layer) is None else v[some]
            kv_write(k[some], value, slots[some], pool, layer, backend=backend)


def filled_pool(layout: KvLayout, backend: Backend) -> KvPool:
    """Opened and written by a backend."""
    pool = sealed_pool(layout, backend)
    fill(pool, backend)
    return pool


def verify(pool: KvPool, backend: Backend, **changed: torch.Tensor) -> list[int]:
    """The first wrong layer of each page."""
    arguments = {"page_keys": keys(pool.layout), "num_tokens": counts(pool.layout)} | changed
    return verify_pages(pool, torch.arange(pool.layout.num_pages), **arguments, backend=backend).tolist()


@EACH_LAYOUT
def test_bits_are_the_references(gpu, layout):
    """Opening, writing, rekeying: bytes and tags are those of plain torch, and both find them right, under the new keys only."""
    pools = [sealed_pool(layout, backend) for backend in (Backend.REF, gpu)]
    for pool in pools:
        assert not bool(pool.stored_k.view(torch.uint8).any())
        assert not bool(pool.v.view(torch.uint8).any())
    assert torch.equal(pools[0].seals.tags, pools[1].seals.tags)
    for pool, backend in zip(pools, (Backend.REF, gpu), strict=True):
        fill(pool, backend)
    assert torch.equal(pools[0].stored_k.view(torch.uint8), pools[1].stored_k.view(torch.uint8))
    assert torch.equal(pools[0].seals.tags, pools[1].seals.tags)
    new = keys(layout) * 31 + 7
    for pool, backend in zip(pools, (Backend.REF, gpu), strict=True):
        assert [-1] * PAGES == verify(pool, gpu)
        rekey_pages(pool, torch.arange(PAGES), keys(layout), new, backend=backend)
        assert [-1] * PAGES == verify(pool, gpu, page_keys=new)
        assert [0] * PAGES == verify(pool, gpu)
    assert torch.equal(pools[0].seals.tags, pools[1].seals.tags)


@pytest.mark.parametrize("layout", [LAYOUTS[4], LAYOUTS[6]], ids=lambda x: x.dtype)
def test_what_a_row_overwrites_is_taken_out(gpu, layout):
    """Sums change by the new words minus the old ones, whatever those are."""
    pools = [sealed_pool(layout, gpu) for _ in range(2)]
    for pool, backend in zip(pools, (Backend.REF, gpu), strict=True):
        for side in (pool.stored_k, pool.v):
            raw = side.view(torch.uint8)
            raw.copy_(torch.randint(256, raw.shape, generator=torch.Generator().manual_seed(2)))
        fill(pool, backend)
    assert torch.equal(pools[0].seals.tags, pools[1].seals.tags)


@pytest.mark.parametrize("layout", LAYOUTS[:7:2], ids=lambda x: f"{'latent-' * x.is_latent}{x.dtype}")
def test_every_bit_is_covered(gpu, layout):
    """One bit in each of many pages, in keys, values, rows not written, or a seal: found in its layer, and in no page between them."""
    many = KvLayout(
        layout.num_layers, 4 * PAGES, layout.num_kv_heads, layout.head_dim, layout.page_size, layout.dtype, layout.value_dim,
        layout.value_layers, layout.is_latent,
    )  # fmt: skip
    pool = filled_pool(many, gpu)
    expected = [-1] * many.num_pages
    generator = torch.Generator().manual_seed(5)
    value_layers = [layer for layer in range(many.num_layers) if pool.values_of(layer) is not None]
    sides = [(pool.stored_k, range(many.num_layers)), (pool.seals.tags, range(many.num_layers))]
    sides += [(pool.v, value_layers)] if value_layers else []
    for page in range(0, many.num_pages, 2):
        side, layers = sides[page // 2 % len(sides)]
        stored = side.view(torch.uint8).flatten(2)
        index, byte, bit = (int(torch.randint(n, (), generator=generator)) for n in (len(stored), stored.shape[2], 8))
        stored[index, page, byte] ^= 1 << bit
        expected[page] = layers[index]
    assert expected == verify(pool, gpu)


def test_scales_are_covered(gpu):
    """A flipped bit in a key scale or a value scale spoils all pages of its layer."""
    pool = filled_pool(LAYOUTS[0], gpu)
    for scale in (pool.k_scale, pool.v_scale):
        for bit in (0, 20, 31):
            scale.view(torch.int32)[1, 0] ^= (1 << bit) if bit < 31 else -(2**31)
            assert [1] * PAGES == verify(pool, gpu)
            scale.view(torch.int32)[1, 0] ^= (1 << bit) if bit < 31 else -(2**31)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[6]], ids=lambda x: x.dtype)
def test_a_wrong_reader_finds_no_seal(gpu, layout):
    """Another page key, another number of rows, pages exchanged with their seals."""
    pool = filled_pool(layout, gpu)
    assert [0] * PAGES == verify(pool, gpu, page_keys=KEYS ^ 1)
    assert [0] * PAGES == verify(pool, gpu, page_keys=KEYS ^ (1 << 40))
    num = counts(layout)
    assert [0] * PAGES == verify(pool, gpu, num_tokens=torch.where(num > 0, num - 1, num + 1))
    for part in (pool.k, pool.v, pool.seals.tags):
        part[:, [4, 5]] = part[:, [5, 4]]
    assert [-1] * 4 + [0] * 2 == verify(pool, gpu)


def test_numbers_that_nobody_looks_at(gpu):
    """Where a page or a number of rows lies outside, which only the GPU itself can see, nothing is touched, and fault is found."""
    pool = filled_pool(LAYOUTS[0], gpu)
    tags, stored = pool.seals.tags.clone(), pool.stored_k.clone()
    outside = torch.tensor([PAGES, -1, 2**40])
    open_pages(pool, outside, KEYS[:3], backend=gpu)
    rekey_pages(pool, outside, KEYS[:3], KEYS[1:4], backend=gpu)
    assert torch.equal(tags, pool.seals.tags)
    assert torch.equal(stored.view(torch.uint8), pool.stored_k.view(torch.uint8))
    assert [0] * 3 == verify_pages(pool, outside, KEYS[:3], torch.zeros(3, dtype=torch.int64), backend=gpu).tolist()
    pages, num = torch.tensor([5, 5, 5]), torch.tensor([8, 9, -1])
    assert [-1, 0, 0] == verify_pages(pool, pages, KEYS[[5, 5, 5]], num, backend=gpu).tolist()


def test_no_pages_are_no_error(gpu):
    """Nothing is started for them."""
    pool, none = sealed_pool(LAYOUTS[0], gpu), torch.zeros(0, dtype=torch.int64)
    open_pages(pool, none, none, backend=gpu)
    rekey_pages(pool, none, none, none, backend=gpu)
    assert [] == verify_pages(pool, none, none, none, backend=gpu).tolist()


def test_bad_arguments_are_named(gpu):
    """Shapes, a pool without seals, and one that was made for a CPU."""
    pool, one = sealed_pool(LAYOUTS[0], gpu), torch.tensor([1])
    with pytest.raises(KernelError, match="page_keys must have shape"):
        open_pages(pool, one, torch.tensor([1, 2]), backend=gpu)
    with pytest.raises(KernelError, match="the pool has no seals"):
        verify_pages(KvPool.allocate(LAYOUTS[0], backend=gpu), one, one, one, backend=gpu)
    with pytest.raises(KernelError, match="not laid out for gpu"):
        rekey_pages(KvPool.allocate(LAYOUTS[0], seal_secret=SECRET), one, one, one, backend=gpu)
