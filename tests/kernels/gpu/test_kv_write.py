"""Storing keys and values on GPUs, interpreted: the bytes are the reference's."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.backend import Backend
from kernels.gpu.narrow_floats import from_e4m3
from kernels.kv_pool import KvLayout, KvPool
from kernels.kv_write import kv_write

E4M3 = torch.float8_e4m3fn


def numbers() -> torch.Tensor:
    """All e4m3 numbers, midpoints between neighbours, float32 neighbours of both, what lies beyond, and floats of all magnitudes."""
    exact = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    beyond = torch.tensor([448.01, 463.9, 464.0, 464.1, 480.0, 1e6, 3.4028e38, float("inf"), 1e-30, 1e-45])
    edges = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, beyond])
    up = torch.tensor(float("inf"))
    edges = torch.cat([edges, edges.nextafter(up), edges.nextafter(-up)])
    bits = torch.randint(-(2**31), 2**31, (8192,), dtype=torch.int64).to(torch.int32)
    values = torch.cat([edges, -edges, bits.view(torch.float32), torch.randn(2048)])
    return values[~torch.isnan(values)]


def pair(gpu: Backend, dtype: str, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored k and v by the reference, then by the GPU's kernel."""
    values = numbers() * scale
    rows = torch.nn.functional.pad(values, (0, -len(values) % 512)).view(-1, 2, 256)
    stored = []
    for backend in (Backend.REF, gpu):
        scales = torch.full((1, 2), scale)
        pool = KvPool.allocate(KvLayout(1, len(rows), 2, 256, 1, dtype), scales, scales, backend=gpu)
        kv_write(rows, -rows, torch.arange(len(rows)), pool, 0, backend=backend)
        stored += [pool.k_rows.view(torch.uint8), pool.v.view(torch.uint8)]
    return stored[0], stored[1], stored[2], stored[3]


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-6])
def test_fp8_bytes(gpu, scale):
    """Rounding to nearest even, clamping, subnormals and signed zeros are those of torch's cast; no number becomes NaN."""
    k, v, gpu_k, gpu_v = pair(gpu, "fp8", scale)
    assert torch.equal(k, gpu_k)
    assert torch.equal(v, gpu_v)
    assert not bool(((gpu_k & 0x7F) == 0x7F).any())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_bytes(gpu, dtype):
    """Rounding to nearest even; bfloat16 may end at infinity, float16 is clamped before."""
    k, v, gpu_k, gpu_v = pair(gpu, dtype)
    assert torch.equal(k, gpu_k)
    assert torch.equal(v, gpu_v)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_nan_is_stored_as_nan(gpu, dtype):
    """NaN of either sign is not laundered into a number; in e4m3 it's the code 0x7f."""
    pool = KvPool.allocate(KvLayout(1, 1, 1, 8, 1, dtype), backend=gpu)
    k = torch.zeros(1, 1, 8)
    k[0, 0, 3], k[0, 0, 5] = float("nan"), -float("nan")
    kv_write(k, k, torch.zeros(1, dtype=torch.int64), pool, 0, backend=gpu)
    if dtype == "fp8":
        assert pool.k.flatten().tolist() == [0, 0, 0, 0x7F, 0, 0x7F, 0, 0]
    else:
        assert torch.isnan(pool.k.flatten()).nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(("heads", "dim", "page_size"), [(1, 8, 1), (3, 64, 16), (8, 8, 8)])
def test_rows_land_in_their_slots_and_nowhere_else(gpu, heads, dim, page_size, dtype):
    """Head by head, each row is at its page and offset; negative slots write nothing; all else keeps its bytes."""
    layout = KvLayout(2, 5, heads, dim, page_size, dtype)
    scales = 2.0 ** torch.arange(2 * heads).view(2, heads) / 16
    slots = torch.randperm(5 * page_size)[: 5 * page_size // 2 + 1]
    slots[::3] = -1
    k, v = torch.randn(len(slots), heads, dim), torch.randn(len(slots), heads, dim)
    pools = []
    for backend in (Backend.REF, gpu):
        pool = KvPool.allocate(layout, scales, scales.flip(1), backend=gpu)
        pool.k_rows.view(torch.uint8).fill_(0x5A)
        pool.v.view(torch.uint8).fill_(0xA5)
        kv_write(k, v, slots, pool, 1, backend=backend)
        pools.append(pool)
    assert torch.equal(pools[0].k_rows.view(torch.uint8), pools[1].k_rows.view(torch.uint8))
    assert torch.equal(pools[0].v.view(torch.uint8), pools[1].v.view(torch.uint8))


@triton.jit
def _decode(pairs, out):
    place = tl.arange(0, 256)
    words = tl.load(pairs + place)
    tl.store(out + 2 * place, from_e4m3(words, 0, False).to(tl.float32))
    tl.store(out + 2 * place + 1, from_e4m3(words, 1, False).to(tl.float32))


def test_every_code_is_read_exactly():
    """All 256 codes in both halves of a pair, in integer arithmetic (the interpreter gets the processor's own conversion wrong)."""
    codes = torch.stack([torch.arange(256), torch.arange(256).flip(0)], dim=1).to(torch.uint8)
    out = torch.empty(512)
    _decode[(1,)](codes.view(torch.int16), out)
    expected = codes.flatten().view(E4M3).float()
    assert torch.equal(expected.nan_to_num(nan=1e9), out.nan_to_num(nan=1e9))
