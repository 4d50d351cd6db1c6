"""The kernels of latent attention for GPUs, interpreted: against float64 and row by row against themselves."""

import pytest
import torch

from kernels.backend import Backend
from kernels.head_matmul import HeadWeights, head_matmul
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.layer_norm import layer_norm
from kernels.mla_attention import mla_attention

GPU = Backend.GPU
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])


@pytest.fixture(autouse=True, scope="module")
def products_in_order(ordered_products: None) -> None:
    """Every test of this file compares bits."""


@DTYPES
@pytest.mark.parametrize(("heads", "latent", "rope", "page_size"), [(3, 24, 8, 4), (17, 64, 16, 16), (2, 16, 0, 8)])
def test_layouts(check_close, make_latent, random_choice, heads, latent, rope, page_size, dtype):
    """Odd sizes; one head and more than a tile of them; all positions and selected ones; stale NaN."""
    case = make_latent(
        [1, 37, 63],
        [1, 4, 1],
        heads=heads,
        latent=latent,
        rope=rope,
        page_size=page_size,
        dtype=dtype,
        scale=0.5,
        placed_for=GPU,
    )
    check_close(f"gpu_attention_{dtype}", case.attend(GPU), case.exact())
    selected = random_choice(case, 9)
    check_close(f"gpu_attention_{dtype}", case.attend(GPU, selected), case.exact(selected))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_rows_alone_and_in_a_batch(check_close, make_latent, random_choice, dtype):
    """A token's bits are the same alone, where ranges are shared by programs, and beside others."""
    case = make_latent([270, 9], [2, 1], heads=3, dtype=dtype, placed_for=GPU)
    for selected in (None, random_choice(case, 264)):
        together = case.attend(GPU, selected)
        check_close(f"gpu_attention_{dtype}", together, case.exact(selected))
        for row in (0, 1, 2):
            chosen = None if selected is None else selected[[row]]
            assert torch.equal(together[row : row + 1], case.some([row]).attend(GPU, chosen))


def test_padding_and_empty_rows_are_zero(make_latent):
    """A row at a negative position and one with nothing selected give zeros and change nobody's bits, many together or each alone."""
    case = make_latent([40], [2], placed_for=GPU)
    table = torch.cat([case.rows.page_table, torch.full_like(case.rows.page_table, 12)])
    rows = AttentionRows(table, torch.tensor([0, 0, 1]).int(), torch.tensor([38, 39, -1]).int()).to(torch.device("cpu"))
    parts = [torch.cat([part, torch.full_like(part[:1], float("nan"))]) for part in (case.q_latent, case.q_rope)]
    result = mla_attention(*parts, case.pool, 1, rows, softmax_scale=0.17, backend=GPU)
    assert torch.equal(case.attend(GPU), result[:2])
    assert not bool(result[2].any())
    selected = torch.tensor([[1, 2], [-1, -1]], dtype=torch.int32)
    assert not bool(case.attend(GPU, selected)[1].any())
    assert not bool(case.some([1]).attend(GPU, selected[1:]).any())


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (17, 40)])
def test_indexer(make_latent, heads, dim, dtype):
    """The choice by exact scores, but for scores that rounded queries bring within a hair; ascending, alone as in a batch."""
    case = make_latent([70, 9], [5, 9], index_heads=heads, index_dim=dim, dtype=dtype, placed_for=GPU)
    result, wanted = case.choose(GPU, 12), case.exact_choice(12)
    differing = sum(len(set(a.tolist()) ^ set(b.tolist())) for a, b in zip(wanted, result, strict=True))
    assert differing <= 6
    for row in (0, 4, 9):
        assert torch.equal(result[row : row + 1], case.some([row]).choose(GPU, 12))
    everything = case.choose(GPU, 100)
    assert torch.equal(case.exact_choice(100), everything)


def test_indexer_ties_and_nan(make_latent):
    """Equal scores go by the lower position; a NaN is above all."""
    case = make_latent([50], [2], placed_for=GPU)
    case.pool.values_of(1).zero_()
    assert [[0, 1, 2, 3, 4]] * 2 == case.choose(GPU, 5).tolist()
    case.pool.values_of(1)[int(case.rows.page_table[0, 10]), 0, 1, 3] = float("nan")
    assert [[0, 1, 2, 3, 41]] * 2 == case.choose(GPU, 5).tolist()


@DTYPES
def test_kv_write(dtype):
    """A latent pool's bytes are the reference's, with and without an indexer's keys."""
    pools = []
    for backend in (Backend.REF, GPU):
        torch.manual_seed(2)
        pool = KvPool.allocate(KvLayout(2, 3, 1, 40, 4, dtype, 24, (1,), is_latent=True), backend=GPU)
        k, v, slots = torch.randn(5, 1, 40), torch.randn(5, 1, 24), torch.tensor([3, -1, 11, 0, 6])
        kv_write(k, None, slots, pool, 0, backend=backend)
        kv_write(k.flip(0), v, slots, pool, 1, backend=backend)
        pools.append(pool)
    assert torch.equal(pools[0].k_rows.view(torch.uint8), pools[1].k_rows.view(torch.uint8))
    assert torch.equal(pools[0].v.view(torch.uint8), pools[1].v.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_products(check_close, dtype):
    """A matrix for each head, odd sizes, rows apart; and the norm of an indexer's key."""
    matrices, wide = torch.randn(3, 70, 37).to(dtype), torch.randn(18, 3 * 37 + 5)
    x, w = wide[:, :111].unflatten(1, (3, 37)), HeadWeights.from_matrices(matrices, GPU)
    result = head_matmul(x, w, backend=GPU)
    check_close("gpu_matmul_float32", result, torch.einsum("thk,hnk->thn", x.double(), matrices.double()))
    assert torch.equal(result[17:], head_matmul(x[17:], w, backend=GPU))
    weight, bias = torch.randn(111), torch.randn(111)
    normal = layer_norm(wide[:, :111].contiguous(), weight, bias, 1e-6, backend=GPU)
    exact = torch.nn.functional.layer_norm(wide[:, :111].double(), (111,), weight.double(), bias.double(), 1e-6)
    check_close("layer_norm", normal, exact)
