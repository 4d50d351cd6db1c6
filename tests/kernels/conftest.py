"""Kernels under test: the reference and each native instruction set as backends, random operands, and the one table of tolerances."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels import _native
from kernels.backend import Backend, resolve
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.weights import Int4Weight, Int8Weight

ISAS = ("portable", "avx2", "avx512")

# Largest RMS of the error over RMS of the exact result, which is computed in float64.
TOLERANCES = {
    "matmul": 1e-6,  # float32 sums; also quantized ones against their own rounded activations
    "matmul_rounding": 5e-4,  # quantized products against unrounded activations: 16 bits a group, outliers included
    "rms_norm": 5e-7,
    "rotary": 5e-7,
    "silu_mul": 5e-7,
    "gelu_mul": 5e-7,
    "moe": 2e-6,  # two products and a sum over experts
    "paged_attention": 1e-6,
    "mla_attention": 2e-6,  # a score is one chain of additions
    "layer_norm": 5e-7,
    "gpu_matmul": 6e-4,  # both operands have the 11 bits of float16
    "gpu_matmul_float32": 1e-6,
    "gpu_moe_float32": 3e-6,  # two products
    "gpu_attention_bf16": 4e-3,  # queries and weights of keys have the 8 bits of the stored keys
    "gpu_attention_fp16": 4e-4,  # and here the 11 of float16
    "gpu_attention_fp8": 4e-4,  # which holds e4m3 exactly
}

CheckClose = Callable[[str, torch.Tensor, torch.Tensor], None]
MakeInt4 = Callable[..., Int4Weight]
MakeInt8 = Callable[..., Int8Weight]


def _select(isa: str) -> None:
    try:
        _native.select(isa)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread() -> Iterator[None]:
    """The reference on one thread: its many small steps are slower on two, far slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """Native code as it starts in production, and put back so after a test that changed it."""
    resolve("cpu")
    threads = _native.num_threads()
    torch.manual_seed(0)
    yield
    if _native.num_threads() != threads:
        _native.set_num_threads(threads)
    _native.select(os.environ.get("SLUICEGATE_ISA", ""))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, native: None) -> str:
    """Each instruction set that this machine has, selected."""
    _select(request.param)
    return str(request.param)


@pytest.fixture(params=("ref", *ISAS))
def backend(request: pytest.FixtureRequest, native: None) -> Backend:
    """The reference, and native code with each instruction set."""
    if request.param == "ref":
        return Backend.REF
    _select(request.param)
    return Backend.CPU


@pytest.fixture(params=("ref", *ISAS, "gpu"))
def any_backend(request: pytest.FixtureRequest, native: None) -> Backend:
    """The same, and the kernels for GPUs in Triton's interpreter."""
    if request.param in ("ref", "gpu"):
        return Backend(request.param)
    _select(request.param)
    return Backend.CPU


@pytest.fixture
def on_each_isa() -> Callable[[Callable[[], torch.Tensor]], dict[str, torch.Tensor]]:
    """A function that computes one result with each instruction set of this machine; at least two can be compared."""

    def compute(call: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        results = {}
        for name in ISAS:
            try:
                _native.select(name)
            except ValueError:
                continue
            results[name] = call()
        if len(results) < 2:
            pytest.skip("this processor has portable code only")
        return results

    return compute


@pytest.fixture(scope="session")
def poisoned() -> Callable[..., torch.Tensor]:
    """A function of a shape: a tensor of NaN, to be written whole."""
    return lambda *shape: torch.full(shape, float("nan"))


@pytest.fixture(scope="session")
def check_close() -> CheckClose:
    """A function of a name in TOLERANCES, a result and the exact one in float64."""

    def check(name: str, actual: torch.Tensor, exact: torch.Tensor) -> None:
        assert exact.dtype is torch.float64
        assert exact.shape == actual.shape
        assert bool(torch.isfinite(actual).all()), "the result holds NaN or infinity, or was not written whole"
        error = (actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert float(error) <= TOLERANCES[name]

    return check


def _scales(n: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    return (0.01 + 0.1 * torch.rand(n, groups)).to(dtype)


@pytest.fixture(scope="session")
def make_int4() -> MakeInt4:
    """A function of sizes: a random 4-bit matrix."""

    def make(n: int, k: int, group: int = 32, dtype: torch.dtype = torch.float16) -> Int4Weight:
        scale = _scales(n, k // group, dtype)
        minimum = (-torch.rand(n, k // group)).to(dtype)
        return Int4Weight.from_codes(torch.randint(0, 16, (n, k), dtype=torch.uint8), scale, minimum, group)

    return make


@pytest.fixture(scope="session")
def make_int8() -> MakeInt8:
    """A function of sizes: a random 8-bit matrix, with minima if asked for."""

    def make(
        n: int, k: int, group: int = 32, dtype: torch.dtype = torch.float16, *, minimum: bool = False
    ) -> Int8Weight:
        lowest = torch.rand(n, k // group).to(dtype) if minimum else None
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        return Int8Weight.from_codes(codes, _scales(n, k // group, dtype), lowest, group)

    return make


@dataclass(frozen=True)
class PagedCase:
    """Sequences whose keys and values lie in scattered pages of a pool, and queries for the last tokens of each."""

    pool: KvPool
    layer: int
    q: torch.Tensor  # float32 [T, heads, D]
    rows: AttentionRows
    keys: list[torch.Tensor]  # of each sequence, what the pool should hold: float64 [length, kv_heads, D]
    values: list[torch.Tensor]

    @property
    def softmax_scale(self) -> float:
        """The usual one."""
        return float(self.pool.layout.head_dim**-0.5)

    def attend(
        self, backend: Backend, rows: slice | list[int] | None = None, window: int | None = None
    ) -> torch.Tensor:
        """The result for some or all of the query rows."""
        chosen = slice(None) if rows is None else rows
        some = AttentionRows(
            self.rows.page_table,
            self.rows.row_sequence[chosen].contiguous(),
            self.rows.row_position[chosen].contiguous(),
        )
        some.check("test", self.pool.layout)
        q = self.q[chosen].contiguous()
        scale = self.softmax_scale
        return paged_attention(q, self.pool, self.layer, some, softmax_scale=scale, window=window, backend=backend)

    def exact(self, window: int | None = None) -> torch.Tensor:
        """Float64, from the keys and values themselves: it knows no pages."""
        ratio = self.q.shape[1] // self.pool.layout.num_kv_heads
        out = []
        for q, sequence, position in zip(self.q, self.rows.row_sequence, self.rows.row_position, strict=True):
            first = max(0, int(position) + 1 - window) if window else 0
            keys, values = (
                side[int(sequence)][first : int(position) + 1].repeat_interleave(ratio, dim=1)
                for side in (self.keys, self.values)
            )
            scores = torch.einsum("hd,khd->hk", q.double(), keys) * self.softmax_scale
            out.append(torch.einsum("hk,khd->hd", torch.softmax(scores, dim=1), values))
        return torch.stack(out)


def _through_storage(values: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    scaled = values / scale.view(1, -1, 1)
    narrow = {
        "bf16": scaled.bfloat16,
        "fp16": scaled.clamp(-65504, 65504).half,
        "fp8": lambda: scaled.clamp(-448, 448).to(torch.float8_e4m3fn),
    }[dtype]()
    return narrow.double() * scale.double().view(1, -1, 1)


MakePaged = Callable[..., PagedCase]


@pytest.fixture(scope="session")
def make_paged() -> MakePaged:
    """A function of a layout and, for each sequence, its length and how many of its last tokens ask.

    Pages are shuffled, and unless told otherwise whatever nobody wrote is NaN. `spread` bounds magnitudes to within 2 of each other.
    """

    def make(
        layout: KvLayout,
        lengths: list[int],
        num_queries: list[int],
        ratio: int,
        backend: Backend,
        *,
        poison: bool = True,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        spread: float | None = None,
        placed_for: Backend = Backend.CPU,
    ) -> PagedCase:
        pool, layer = KvPool.allocate(layout, k_scale, v_scale, backend=placed_for), layout.num_layers - 1
        if poison:
            for side in (pool.k_rows if placed_for is Backend.GPU else pool.k, pool.v):
                side.view(torch.uint8).fill_(0xFF)
        size, shape = layout.page_size, (layout.num_kv_heads, layout.head_dim)
        unused = torch.randperm(layout.num_pages, dtype=torch.int32)
        table = torch.zeros(len(lengths), max(lengths) // size + 1, dtype=torch.int32)
        keys, values, sequences, positions = [], [], [], []
        for index, (length, asking) in enumerate(zip(lengths, num_queries, strict=True)):
            k, v = torch.randn(length, *shape), torch.randn(length, *shape)
            if spread is not None:
                k, v = (x.sign() * spread * (1 + torch.rand_like(x)) for x in (k, v))
            place, num_pages = torch.arange(length), -(-length // size)
            table[index, :num_pages], unused = unused[:num_pages], unused[num_pages:]
            slots = table[index, place // size].long() * size + place % size
            kv_write(k, v, slots, pool, layer, backend=backend)
            keys.append(_through_storage(k, pool.k_scale[layer], layout.dtype))
            values.append(_through_storage(v, pool.v_scale[layer], layout.dtype))
            sequences += [index] * asking
            positions += range(length - asking, length)
        q = torch.randn(len(positions), layout.num_kv_heads * ratio, layout.head_dim)
        rows = AttentionRows(
            table, torch.tensor(sequences, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
        )
        return PagedCase(pool, layer, q, rows, keys, values)

    return make
