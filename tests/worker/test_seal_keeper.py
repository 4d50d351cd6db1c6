"""The executor's side of sealing, over pools for a CPU and for a GPU."""

import pytest
import torch

from kernels.backend import Backend, resolve
from kernels.kv_pool import KvLayout, KvPool
from worker.cache.page_pool import PageId
from worker.seal_keeper import SealKeeper
from worker.sealing import SealPlan

KEYS = [5, -(2**62), 77, 2**63 - 1, 0]


@pytest.fixture(params=["cpu", "gpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Native code, and the kernels for GPUs in Triton's interpreter."""
    return resolve(request.param)


@pytest.fixture
def pool(backend: Backend) -> KvPool:
    """Five pages that hold something nobody sealed."""
    layout = KvLayout(2, 5, 1, 8, 2, "bf16")
    pool = KvPool.allocate(layout, seal_secret=bytes(32), backend=backend)
    for side in (pool.k, pool.v):
        side.fill_(3)
    return pool


@pytest.mark.parametrize("count", [1, 2, 5])
def test_plans_are_carried_out(pool, backend, count):
    """Any number of pages is opened, zeroed, and given other keys; what wasn't opened has no valid seal."""
    keeper = SealKeeper(pool, backend)
    opened = [(PageId(page), KEYS[page]) for page in range(count)]
    keeper.carry_out(SealPlan(opened=opened))
    assert not bool(pool.k[:, :count].any())
    assert count == 5 or bool(pool.k[:, count:].all())
    # Whole pages are verified. These hold zeros, so that nothing but the constants of rows is missing.
    pool.seals.tags.view(torch.int32).view(2, 5, 1, 2)[:, :count] += pool.seals.keys.rows[2]
    pages = [PageId(page) for page in range(5)]
    assert [-1] * count + [0] * (5 - count) == keeper.verify(pages, KEYS)
    assert [-1] * count == keeper.verify(pages[:count], KEYS[:count])
    keeper.carry_out(SealPlan(rekeyed=[(page, key, key ^ 1) for page, key in opened]))
    assert [0] * count == keeper.verify(pages[:count], KEYS[:count])
    assert [-1] * count == keeper.verify(pages[:count], [key ^ 1 for key in KEYS[:count]])


def test_preparing_changes_no_page(pool, backend):
    """Nor a seal: what is compiled by it is asked for a page that isn't there."""
    before = [tensor.clone() for tensor in (pool.k, pool.v, pool.seals.tags)]
    SealKeeper(pool, backend).prepare()
    assert all(map(torch.equal, before, (pool.k, pool.v, pool.seals.tags)))


def test_scales_are_mended(pool, backend):
    """They come back as the pool was made, and it's told whether they had changed."""
    keeper = SealKeeper(pool, backend)
    assert not keeper.mend_scales()
    pool.v_scale[1, 0] = 9
    assert keeper.mend_scales()
    assert bool((pool.v_scale == 1).all())
    assert not keeper.mend_scales()
