"""Mixtures of experts for GPUs, interpreted: against the reference, and row by row against themselves."""

import dataclasses

import pytest
import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.expert_weights import ExpertMatrices, Experts
from kernels.moe import GpuExpertMatrices, GpuExperts, Routing, moe
from kernels.weights import DenseWeight

HIDDEN, SIZE, EXPERTS = 64, 32, 6
ROUTINGS = {
    "softmax": {"top_k": 2},
    "softmax normalized": {"top_k": 3, "normalize": True, "scale": 1.5},
    "sigmoid with bias": {"top_k": 2, "scoring": "sigmoid", "bias": torch.linspace(-0.7, 0.4, EXPERTS), "normalize": True, "scale": 2.5},
    "groups": {"top_k": 2, "scoring": "sigmoid", "num_groups": 3, "top_groups": 2, "normalize": True},
    "groups of one": {"top_k": 2, "num_groups": 6, "top_groups": 4},
}  # fmt: skip


@pytest.fixture
def make_experts(make_int4, make_int8):
    """Experts of one kind of weight."""

    def make(kind: str, hidden: int = HIDDEN, size: int = SIZE) -> Experts:
        def matrix(n: int, k: int) -> object:
            if kind == "int4":
                return make_int4(n, k)
            if kind == "int8":
                return make_int8(n, k)
            dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
            return DenseWeight.from_matrix((torch.randn(n, k) * 0.2).to(dtype))

        return Experts(
            ExpertMatrices.gather(EXPERTS, (matrix(2 * size, hidden) for _ in range(EXPERTS))),
            ExpertMatrices.gather(EXPERTS, (matrix(hidden, size) for _ in range(EXPERTS))),
        )

    return make


def placed(experts: Experts) -> GpuExperts:
    """The same experts as the GPU's kernels read them."""
    sides = (
        GpuExpertMatrices.gather(EXPERTS, map(side.matrix, range(EXPERTS))) for side in (experts.gate_up, experts.down)
    )
    return GpuExperts(*sides)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(gpu, check_close, make_experts, poisoned, routing):
    """Every way to choose, ties included, gives what the reference gives."""
    experts, wanted = make_experts("f32"), Routing(EXPERTS, **ROUTINGS[routing])
    x, logits = torch.randn(9, HIDDEN), torch.randint(-2, 3, (9, EXPERTS)).float()
    y = moe(x, logits, placed(experts), wanted, out=poisoned(9, HIDDEN), backend=gpu)
    check_close("gpu_moe_float32", y, moe(x, logits, experts, wanted, backend=Backend.REF).double())


@pytest.mark.parametrize("kind", ["int4", "int8", "bf16", "f32"])
@pytest.mark.parametrize("rows", [1, 20])
def test_weights(gpu, check_close, make_experts, poisoned, kind, rows):
    """Any kind of weight, more rows than a tile has, and something added."""
    experts, wanted = make_experts(kind, 96, 64), Routing(EXPERTS, 2)
    x, logits, added = torch.randn(rows, 96), torch.randn(rows, EXPERTS), torch.randn(rows, 96)
    y = moe(x, logits, placed(experts), wanted, added=added, out=poisoned(rows, 96), backend=gpu)
    exact = moe(x, logits, experts, wanted, added=added, backend=Backend.REF).double()
    check_close("gpu_moe_float32" if kind == "f32" else "gpu_matmul", y, exact)


def test_sizes_that_fill_no_tile(gpu, check_close, make_experts, poisoned):
    """Unquantized experts of odd sizes."""
    experts, wanted = make_experts("f32", 37, 21), Routing(EXPERTS, 2)
    x, logits = torch.randn(5, 37), torch.randn(5, EXPERTS)
    y = moe(x, logits, placed(experts), wanted, out=poisoned(5, 37), backend=gpu)
    check_close("gpu_moe_float32", y, moe(x, logits, experts, wanted, backend=Backend.REF).double())


@pytest.mark.parametrize("kind", ["int4", "bf16"])
def test_rows_alone_and_in_a_batch(gpu, make_experts, kind):
    """A row has the same bits alone as among others, whatever experts those chose."""
    experts, wanted = placed(make_experts(kind)), Routing(EXPERTS, 3, normalize=True)
    x, logits = torch.randn(30, HIDDEN) * 5, torch.randn(30, EXPERTS)
    together = moe(x, logits, experts, wanted, backend=gpu)
    for rows in (slice(0, 1), slice(29, 30), slice(10, 13)):
        part = moe(x[rows].contiguous(), logits[rows].contiguous(), experts, wanted, backend=gpu)
        assert torch.equal(together[rows], part)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_bad_row_harms_no_other(gpu, make_experts, fault):
    """A fault in a row's logits or numbers spoils that row, and no other's bits."""
    experts, wanted = placed(make_experts("int4")), Routing(EXPERTS, 2)
    x, logits = torch.randn(6, HIDDEN), torch.randn(6, EXPERTS)
    healthy = moe(x, logits, experts, wanted, backend=gpu)
    logits[1, 3], x[4, 40] = fault, fault
    result = moe(x, logits, experts, wanted, backend=gpu)
    others = [0, 2, 3, 5]
    assert torch.equal(healthy[others], result[others])
    assert bool(torch.isnan(result[1]).all())
    assert not bool(torch.isfinite(result[4]).any())


def test_no_rows_and_wrong_experts(gpu, make_experts):
    """An empty batch has an empty result; experts of another backend are refused."""
    experts = make_experts("f32")
    x, logits = torch.zeros(0, HIDDEN), torch.zeros(0, EXPERTS)
    assert (0, HIDDEN) == tuple(moe(x, logits, placed(experts), Routing(EXPERTS, 2), backend=gpu).shape)
    for given, backend in ((experts, gpu), (placed(experts), Backend.CPU)):
        with pytest.raises(KernelError, match="not laid out"):
            moe(x, logits, given, Routing(EXPERTS, 2), backend=backend)


def test_experts_that_do_not_fit_each_other_are_refused(make_experts):
    """As on a CPU: sizes of one layer beside those of another would be read beyond their ends."""
    one, other = placed(make_experts("f32")), placed(make_experts("f32", size=2 * SIZE))
    with pytest.raises(KernelError, match=r"^GpuExperts: gate_up .* and down .* don't fit each other$"):
        GpuExperts(one.gate_up, other.down)
    fewer = dataclasses.replace(one.down, units=one.down.units[1:])
    with pytest.raises(KernelError, match="don't fit each other"):
        GpuExperts(one.gate_up, fewer)
