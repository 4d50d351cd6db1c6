"""Kernels under test: the reference and each native instruction set as backends, random operands, and the one table of tolerances."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels import _native
from kernels.backend import Backend, resolve
from kernels.weights import Int4Weight, Int8Weight

ISAS = ("portable", "avx2", "avx512")

# Largest RMS of the error over RMS of the exact result, which is computed in float64.
TOLERANCES = {
    "matmul": 1e-6,  # float32 sums; also quantized ones against their own rounded activations
    "matmul_rounding": 1e-4,  # quantized products against unrounded activations: 16 bits a group
    "rms_norm": 5e-7,
    "rotary": 5e-7,
    "silu_mul": 5e-7,
    "paged_attention": 1e-6,
}

CheckClose = Callable[[str, torch.Tensor, torch.Tensor], None]
MakeInt4 = Callable[..., Int4Weight]
MakeInt8 = Callable[..., Int8Weight]


def _select(isa: str) -> None:
    try:
        _native.select(isa)
    except ValueError as error:
        pytest.skip(str(error))


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
