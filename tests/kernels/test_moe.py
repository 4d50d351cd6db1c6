"""Mixtures of experts against a plain float64 computation, and the promise that a row's bits are its own."""

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.expert_weights import ExpertMatrices, Experts
from kernels.moe import Routing, moe
from kernels.moe.ref import route_ref
from kernels.recording import Recording
from kernels.weights import DenseWeight, Fp8Weight

HIDDEN, SIZE, EXPERTS = 96, 64, 12
ROUTINGS = {
    "softmax": {"top_k": 3},
    "softmax normalized": {"top_k": 3, "normalize": True, "scale": 1.5},
    "one expert": {"top_k": 1},
    "all experts": {"top_k": EXPERTS, "normalize": True},
    "sigmoid with bias": {"top_k": 4, "scoring": "sigmoid", "bias": True, "normalize": True, "scale": 2.5},
    "groups": {"top_k": 3, "scoring": "sigmoid", "bias": True, "num_groups": 4, "top_groups": 2, "normalize": True},
    "groups of one": {"top_k": 2, "scoring": "sigmoid", "num_groups": 12, "top_groups": 5},
    "softmax in groups": {"top_k": 5, "num_groups": 2, "top_groups": 1},
}


def routing_of(name: str, num_experts: int = EXPERTS) -> Routing:
    options = dict(ROUTINGS[name])
    if options.pop("bias", False):
        options["bias"] = torch.linspace(-0.7, 0.4, num_experts)
    return Routing(num_experts, **options)


@pytest.fixture
def make_experts(make_int4, make_int8):
    """Experts of one kind of weight: (kind, number, hidden, size) -> Experts."""

    def make(kind: str, num_experts: int = EXPERTS, hidden: int = HIDDEN, size: int = SIZE) -> Experts:
        def matrix(n: int, k: int) -> object:
            if kind == "int4":
                return make_int4(n, k)
            if kind == "int8":
                return make_int8(n, k, minimum=True)
            if kind == "fp8":
                scale = torch.rand(n, -(-k // 128)) * 0.3
                return Fp8Weight.from_codes(torch.randn(n, k).to(torch.float8_e4m3fn), scale)
            dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[kind]
            return DenseWeight.from_matrix((torch.randn(n, k) * 0.2).to(dtype))

        return Experts(
            ExpertMatrices.gather(num_experts, (matrix(2 * size, hidden) for _ in range(num_experts))),
            ExpertMatrices.gather(num_experts, (matrix(hidden, size) for _ in range(num_experts))),
        )

    return make


def exact(x: torch.Tensor, logits: torch.Tensor, experts: Experts, routing: Routing) -> torch.Tensor:
    """Each row by itself in float64, by the definition: choose with plain Python, then multiply."""
    rows = []
    for row, scores in zip(x.double(), logits.double().tolist(), strict=True):
        total = sum(2.718281828459045**s for s in scores)
        points = [
            1 / (1 + 2.718281828459045**-s) if routing.scoring == "sigmoid" else 2.718281828459045**s / total
            for s in scores
        ]
        choice = [p + (0 if routing.bias is None else float(routing.bias[e])) for e, p in enumerate(points)]
        per_group = routing.num_experts // routing.num_groups
        worth = [sum(sorted(choice[g * per_group : (g + 1) * per_group])[-2:]) for g in range(routing.num_groups)]
        groups = sorted(range(routing.num_groups), key=lambda g: (-worth[g], g))[: routing.top_groups]
        allowed = [e for e in range(routing.num_experts) if e // per_group in groups]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: routing.top_k]
        norm = sum(points[e] for e in chosen) if routing.normalize else 1.0
        result = torch.zeros_like(row)
        for expert in chosen:
            gate, up = (experts.gate_up.matrix(expert).dequantize().double() @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            result += (
                points[expert] / norm * routing.scale * (experts.down.matrix(expert).dequantize().double() @ inner)
            )
        rows.append(result)
    return torch.stack(rows)  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(backend, check_close, make_experts, poisoned, routing):
    """Every way to choose gives the weighted sum of the right experts, written whole."""
    experts, wanted = make_experts("f32"), routing_of(routing)
    x, logits = torch.randn(19, HIDDEN), torch.randn(19, EXPERTS) * 3
    y = moe(x, logits, experts, wanted, out=poisoned(19, HIDDEN), backend=backend)
    check_close("moe", y, exact(x, logits, experts, wanted))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "bf16", "f16", "f32"])
@pytest.mark.parametrize(("rows", "experts", "hidden", "size"), [(1, 5, 32, 32), (3, 7, 64, 96), (300, 3, 32, 64)])
def test_weights(backend, check_close, make_experts, poisoned, kind, rows, experts, hidden, size):
    """Any kind of weight, more rows than are taken at a time, and something added; quantized products round their activations."""
    given, wanted = make_experts(kind, experts, hidden, size), Routing(experts, 2, normalize=True)
    x, logits, added = torch.randn(rows, hidden), torch.randn(rows, experts), torch.randn(rows, hidden)
    y = moe(x, logits, given, wanted, added=added, out=poisoned(rows, hidden), backend=backend)
    is_rounded = kind in ("int4", "int8") and backend is Backend.CPU
    check_close("matmul_rounding" if is_rounded else "moe", y, exact(x, logits, given, wanted) + added.double())


def test_sizes_that_fill_no_panel(backend, check_close, make_experts, poisoned):
    """Unquantized experts of odd sizes."""
    given, wanted = make_experts("f32", 3, 37, 21), Routing(3, 2)
    x, logits = torch.randn(9, 37), torch.randn(9, 3)
    y = moe(x, logits, given, wanted, out=poisoned(9, 37), backend=backend)
    check_close("moe", y, exact(x, logits, given, wanted))


def test_of_equal_experts_the_first_is_chosen(backend, make_experts):
    """Ties in scores go to the lower number, in groups too; the choice is seen in the result."""
    experts, x = make_experts("f32"), torch.randn(2, HIDDEN)
    level = torch.zeros(2, EXPERTS)
    prefer = torch.full((2, EXPERTS), -1.0)
    prefer[:, :2] = 0.0  # equal to nothing else
    options = {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2}
    assert torch.equal(
        moe(x, level, experts, Routing(EXPERTS, 2, **options), backend=backend),
        moe(x, prefer, experts, Routing(EXPERTS, 2, **options), backend=backend),
    )


def test_no_expert_is_chosen_twice_when_scores_vanish(backend, make_experts):
    """Logits so far apart that all scores but one are zero: the others are still chosen in order, and count nothing."""
    experts, x = make_experts("f32"), torch.randn(1, HIDDEN)
    logits = torch.full((1, EXPERTS), -1e30)
    logits[0, 5] = 1e30
    one = moe(x, logits, experts, Routing(EXPERTS, 1), backend=backend)
    three = moe(x, logits, experts, Routing(EXPERTS, 3, normalize=True), backend=backend)
    assert torch.isfinite(one).all()
    torch.testing.assert_close(one, three)


def test_native_chooses_as_the_reference_does(make_experts):
    """Among many rows with coarse logits, full of ties, the sum is the reference's: not one choice differs."""
    experts = make_experts("f32", 16, 16, 4)
    logits = torch.randint(-2, 3, (500, 16)).float()
    x = torch.randn(500, 16)
    for options in (
        {"top_k": 4},
        {"top_k": 4, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "normalize": True},
    ):
        wanted = Routing(16, **options)
        ours = moe(x, logits, experts, wanted, backend=Backend.CPU)
        torch.testing.assert_close(ours, moe(x, logits, experts, wanted, backend=Backend.REF), rtol=1e-4, atol=1e-5)  # fmt: skip


def test_choices_are_ascending_and_distinct():
    """The reference's choice lists each expert once, in order."""
    chosen, _ = route_ref(torch.randn(50, 16), Routing(16, 6))
    assert bool((chosen.diff(dim=1) > 0).all())


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "f32"])
def test_rows_alone_and_in_a_batch(backend, make_experts, kind):
    """A row has the same bits alone as among any number of others, whatever experts those chose."""
    experts, wanted = make_experts(kind), routing_of("sigmoid with bias")
    x, logits = torch.randn(300, HIDDEN) * 5, torch.randn(300, EXPERTS)  # more than are taken at a time
    together = moe(x, logits, experts, wanted, backend=backend)
    for rows in (slice(0, 1), slice(299, 300), slice(30, 33), slice(200, 290)):
        part = moe(x[rows].contiguous(), logits[rows].contiguous(), experts, wanted, backend=backend)
        assert torch.equal(together[rows], part)


@pytest.mark.parametrize("kind", ["int4", "f32"])
def test_threads_and_instruction_sets_change_no_bit(on_each_isa, make_experts, kind):
    """Any number of threads and any instruction set."""
    experts, wanted = make_experts(kind), routing_of("groups")
    x, logits = torch.randn(40, HIDDEN), torch.randn(40, EXPERTS)
    results = []
    for count in (1, 2, 5):
        _native.set_num_threads(count)
        results += on_each_isa(lambda: moe(x, logits, experts, wanted, backend=Backend.CPU)).values()
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_bad_row_harms_no_other(backend, make_experts, fault, scoring):
    """A fault in a row's logits or numbers spoils that row, and no other's bits."""
    experts, wanted = make_experts("int4"), Routing(EXPERTS, 3, scoring=scoring)
    x, logits = torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    healthy = moe(x, logits, experts, wanted, backend=backend)
    logits[4, 7] = fault
    x[6, 40] = fault
    result = moe(x, logits, experts, wanted, backend=backend)
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(healthy[others], result[others])
    assert bool(torch.isnan(result[4]).all())
    assert not bool(torch.isfinite(result[6]).any())


def test_no_rows(backend, make_experts):
    """An empty batch has an empty result."""
    given = make_experts("f32")
    assert (0, HIDDEN) == tuple(moe(torch.zeros(0, HIDDEN), torch.zeros(0, EXPERTS), given, Routing(EXPERTS, 2), backend=backend).shape)  # fmt: skip


def test_recorded(make_experts):
    """A recorded call routes anew each time it runs."""
    given, wanted = make_experts("int4"), Routing(EXPERTS, 2)
    x, logits, out = torch.zeros(3, HIDDEN), torch.zeros(3, EXPERTS), torch.zeros(3, HIDDEN)
    recording = Recording()
    with recording.record():
        moe(x, logits, given, wanted, out=out, backend=Backend.CPU)
    for _ in range(2):
        x.copy_(torch.randn(3, HIDDEN))
        logits.copy_(torch.randn(3, EXPERTS))
        recording.run()
        assert torch.equal(moe(x, logits, given, wanted, backend=Backend.CPU), out)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0}, {"top_k": 13}, {"top_k": 1, "num_groups": 5}, {"top_k": 1, "num_groups": 3, "top_groups": 4},
        {"top_k": 4, "num_groups": 4, "top_groups": 1}, {"top_k": 1, "scoring": "tanh"}, {"top_k": 1, "num_groups": 0},
        {"top_k": 1, "bias": torch.zeros(11)}, {"top_k": 1, "bias": torch.full((12,), float("nan"))},
        {"top_k": 1, "bias": torch.zeros(12).double()},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_routings_are_refused(options):
    """Numbers that leave no choice, or a bias of another size."""
    with pytest.raises(KernelError, match=r"^moe: "):
        Routing(12, **options)


def test_arguments_are_checked(make_experts, make_int4):
    """Sizes that don't fit each other, and experts that aren't alike."""
    given = make_experts("f32")
    x, logits = torch.zeros(2, HIDDEN), torch.zeros(2, EXPERTS)
    for bad in ((torch.zeros(2, 5), logits), (x, torch.zeros(3, EXPERTS)), (x.half(), logits), (x, logits.double())):
        with pytest.raises(KernelError, match=r"^moe: "):
            moe(*bad, given, Routing(EXPERTS, 2), backend=Backend.CPU)
    with pytest.raises(KernelError, match=r"^moe: routing is for 11"):
        moe(x, torch.zeros(2, 11), given, Routing(11, 2), backend=Backend.CPU)
    with pytest.raises(KernelError, match="expert 1 differs"):
        ExpertMatrices.gather(2, [make_int4(32, 64), make_int4(32, 64, 64)])
    with pytest.raises(KernelError, match="1 experts instead of 2"):
        ExpertMatrices.gather(2, [make_int4(32, 64)])
    with pytest.raises(KernelError, match="don't fit"):
        Experts(given.down, given.gate_up)
