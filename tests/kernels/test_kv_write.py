"""Storing keys and values: rounding, clamping, scales and places."""

import pytest
import torch

from kernels.errors import KernelError
from kernels.kv_pool import KvLayout, KvPool
from kernels.kv_write import kv_write

E4M3 = torch.float8_e4m3fn


def e4m3_edges() -> torch.Tensor:
    """Every e4m3 number, the midpoints between neighbours, their float32 neighbours, both signs, and what lies beyond the range."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # 0 to 448, ascending
    middles = (numbers[1:] + numbers[:-1]) / 2
    beyond = torch.tensor([448.01, 449.0, 463.9, 464.0, 464.1, 480.0, 1e6, 3e38, float("inf"), 1e-30, 1e-45])
    edges = torch.cat([numbers, middles, beyond])
    up, down = torch.tensor(float("inf")), torch.tensor(-float("inf"))
    edges = torch.cat([edges, edges.nextafter(up), edges.nextafter(down)])
    return torch.cat([edges, -edges])


def random_floats(count: int) -> torch.Tensor:
    """Finite float32 numbers of all magnitudes."""
    numbers = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(numbers), numbers, torch.zeros(()))


def write_one_head(values: torch.Tensor, dtype: str, backend, scale: float = 1.0) -> torch.Tensor:
    """The stored form of a vector of any length, written as tokens of one head of 8."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % 8)).view(-1, 1, 8)
    scales = torch.full((1, 1), scale)
    pool = KvPool.allocate(KvLayout(1, len(padded), 1, 8, 1, dtype), scales, scales)
    kv_write(padded, -padded, torch.arange(len(padded)), pool, 0, backend=backend)
    return pool.k_rows.flatten()[: len(values)]


def test_fp8_rounds_to_nearest_even_and_clamps(backend):
    """Each edge case is stored as torch's cast of the clamped value."""
    values = torch.cat([e4m3_edges(), random_floats(4096), torch.randn(4096)])
    expected = values.clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(expected, write_one_head(values, "fp8", backend))


def test_fp8_never_stores_nan_for_a_number(backend):
    """The codes 0x7f and 0xff come from NaN only, infinity being clamped."""
    codes = write_one_head(torch.cat([e4m3_edges(), random_floats(4096)]), "fp8", backend)
    assert not bool(((codes & 0x7F) == 0x7F).any())


def test_nan_is_stored_as_nan(backend):
    """NaN is not laundered into a number in either format."""
    values = torch.tensor([1.0, float("nan"), 2.0])
    assert write_one_head(values, "fp8", backend).tolist()[1] & 0x7F == 0x7F
    assert torch.isnan(write_one_head(values, "bf16", backend)).tolist() == [False, True, False]


def test_bf16_rounds_to_nearest_even(backend):
    """Each number is stored as torch's cast, those that round up to infinity too."""
    values = torch.cat([random_floats(8192), torch.tensor([3.4028e38, 1.00390625, 1.01171875, 0.0, -0.0])])
    stored = write_one_head(values, "bf16", backend)
    assert torch.equal(values.to(torch.bfloat16).view(torch.int16), stored.view(torch.int16))


def test_fp16_rounds_to_nearest_even_and_clamps(backend):
    """Each number is stored as torch's cast of the clamped value: halves of a step, subnormals and their borders, overflow, zeros, NaN."""
    halves = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    halves = halves[torch.isfinite(halves)]
    between = (halves[1:] + halves[:-1]) / 2
    edges = torch.cat([halves, between, between.nextafter(torch.tensor(1e9)), between.nextafter(torch.tensor(0.0))])
    values = torch.cat(
        [edges, -edges, random_floats(8192), torch.tensor([65519.9, 65520.0, 1e9, float("inf"), float("nan")])]
    )
    expected = values.clamp(-65504, 65504).half()
    stored = write_one_head(values, "fp16", backend)
    assert torch.equal(expected.nan_to_num(1.5).view(torch.int16), stored.nan_to_num(1.5).view(torch.int16))


@pytest.mark.parametrize("scale", [2.0**-6, 0.3, 1.0, 7.0])
def test_fp8_divides_by_the_scale(backend, scale):
    """Codes are those of value / scale, so that the largest value that fits is 448 times the scale."""
    values = torch.randn(512) * 448 * scale
    expected = (values / torch.tensor(scale)).clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(expected, write_one_head(values, "fp8", backend, scale))


SHAPES = [
    (1, 8, 1, {}), (2, 64, 2, {}), (3, 64, 16, {}), (8, 8, 8, {}), (5, 24, 64, {}), (2, 256, 4, {}), (2, 16, 4, {"value_dim": 40}),
    (1, 576, 8, {"value_dim": 0, "is_latent": True}), (1, 72, 4, {"value_dim": 24, "value_layers": (1,), "is_latent": True}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(("heads", "dim", "page_size", "more"), SHAPES, ids=str)
def test_rows_land_in_their_slots_and_nowhere_else(backend, heads, dim, page_size, more, dtype):
    """Head by head, each row is at its page and offset; negative slots write nothing; all else keeps its bytes."""
    layout = KvLayout(3, 7, heads, dim, page_size, dtype, **more)
    head_scales = 2.0 ** torch.arange(3 * heads).view(3, heads) / 16
    pool = KvPool.allocate(layout, head_scales, head_scales.flip(1))
    pool.stored_k.view(torch.uint8).fill_(0x5A)
    pool.v.view(torch.uint8).fill_(0xA5)
    expected_k, expected_v = pool.k_rows.clone(memory_format=torch.contiguous_format), pool.v.clone()
    slots = torch.randperm(7 * page_size)[: 7 * page_size // 2 + 1]
    slots[::3] = -1
    # Rows that lie further apart than they are long, keys and values differently.
    k = torch.randn(len(slots), heads * dim + 5)[:, : heads * dim].unflatten(1, (heads, dim))
    v = torch.randn(len(slots), heads * layout.v_dim + 3)[:, : heads * layout.v_dim].unflatten(1, (heads, layout.v_dim))
    index = layout.value_index(1)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for head in range(heads):
            for source, scale, target in (
                (k, pool.k_scale, expected_k[1]),
                (v, pool.v_scale, expected_v[index:][0] if index >= 0 else None),
            ):
                if target is None:
                    continue
                scaled = source[row, head] / scale[1, head]
                stored = {"bf16": scaled.bfloat16, "fp16": scaled.half}
                code = stored[dtype]() if dtype in stored else scaled.clamp(-448, 448).to(E4M3).view(torch.uint8)
                target[slot // page_size, head, slot % page_size] = code
    kv_write(k, v if index >= 0 else None, slots, pool, 1, backend=backend)
    assert torch.equal(expected_k.view(torch.uint8), pool.k_rows.contiguous().view(torch.uint8))
    assert torch.equal(expected_v.view(torch.uint8), pool.v.view(torch.uint8))


def test_values_are_given_where_there_are_any(backend):
    """A layer with values gets them, one without gets none."""
    pool = KvPool.allocate(KvLayout(2, 2, 1, 16, 4, "bf16", 8, (1,), is_latent=True))
    k, v, slots = torch.zeros(1, 1, 16), torch.zeros(1, 1, 8), torch.tensor([0])
    with pytest.raises(KernelError, match="layer 0 has no values"):
        kv_write(k, v, slots, pool, 0, backend=backend)
    with pytest.raises(KernelError, match="layer 1 has values"):
        kv_write(k, None, slots, pool, 1, backend=backend)
    with pytest.raises(KernelError, match="v must have shape"):
        kv_write(k, k, slots, pool, 1, backend=backend)


def test_many_rows(backend):
    """A long prompt's rows, which threads share, are all stored."""
    pool = KvPool.allocate(KvLayout(1, 100, 3, 64, 16, "bf16"))
    k = torch.randn(1500, 3, 64)
    kv_write(k, -k, torch.arange(1500) + 7, pool, 0, backend=backend)
    stored = pool.k_rows[0].permute(0, 2, 1, 3).reshape(1600, 3, 64)
    assert torch.equal(k.bfloat16(), stored[7:1507])
    assert torch.equal(-pool.k_rows, pool.v)


def test_page_size_of_a_pool_is_explicit():
    """Bytes add up for layouts whose sizes could be mistaken for each other."""
    for heads, dim, page_size, dtype, element in [(8, 8, 8, "fp8", 1), (2, 16, 8, "bf16", 2), (1, 8, 16, "bf16", 2)]:
        layout = KvLayout(3, 5, heads, dim, page_size, dtype)
        assert 2 * 3 * heads * dim * page_size * element == layout.page_bytes
        assert 5 * layout.page_bytes == KvPool.allocate(layout).nbytes
    latent = KvLayout(3, 5, 1, 72, 4, "fp16", 24, (0, 2), is_latent=True)
    assert (3 * 72 + 2 * 24) * 4 * 2 == latent.page_bytes
    assert 5 * latent.page_bytes == KvPool.allocate(latent).nbytes
    assert [0, -1, 1] == [latent.value_index(layer) for layer in range(3)]


def test_scrub_zeroes_one_page_in_all_layers():
    """After a scrub nothing of the page is left, and its neighbours are whole."""
    pool = KvPool.allocate(KvLayout(2, 3, 2, 8, 4, "fp8"))
    pool.k.fill_(0x7F)
    pool.v.fill_(0xFF)
    pool.scrub(1)
    for tensor, poison in ((pool.k, 0x7F), (pool.v, 0xFF)):
        assert [poison, 0, poison] == [int(tensor[:, page].unique()) for page in range(3)]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-38])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_bad_scales_are_refused(name, bad):
    """A scale whose division would give NaN or infinity never gets into a pool."""
    scale = torch.ones(2, 3)
    scale[1, 2] = bad
    with pytest.raises(KernelError, match=name):
        KvPool.allocate(KvLayout(2, 4, 3, 8, 16, "fp8"), **{name: scale})


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(3, 2), torch.ones(1, 1), torch.ones(2, 3).double()])
def test_scales_of_another_shape_are_refused(scale):
    """Scales are one for each layer and kv head, never broadcast."""
    with pytest.raises(KernelError, match="v_scale"):
        KvPool.allocate(KvLayout(2, 4, 3, 8, 16, "fp8"), v_scale=scale)


@pytest.mark.parametrize(
    ("word", "sizes"),
    [
        ("head_dim", (1, 1, 1, 12, 16, "bf16")),
        ("head_dim", (1, 1, 1, 0, 16, "bf16")),
        ("head_dim", (1, 1, 1, 264, 16, "bf16")),
        ("positive", (1, 0, 1, 64, 16, "bf16")),
        ("positive", (1, 1, 1, 64, 0, "bf16")),
        ("dtype", (1, 1, 1, 64, 16, "fp4")),
        ("head_dim", (1, 1, 1, 1032, 16, "bf16", 0, None, True)),
        ("head_dim", (1, 1, 1, 576, 16, "bf16", 0)),
        ("value_dim", (1, 1, 1, 64, 16, "bf16", 12)),
        ("value_dim", (1, 1, 1, 64, 16, "bf16", -8)),
        ("value_layers", (2, 1, 1, 64, 16, "bf16", 8, (0, 2), True)),
        ("value_layers", (2, 1, 1, 64, 16, "bf16", 8, (1, 0), True)),
        ("one kv head", (1, 1, 2, 64, 16, "bf16", 0, None, True)),
    ],
)
def test_bad_layouts_are_refused(word, sizes):
    """A layout that the kernels can't serve is an error that names what is wrong."""
    with pytest.raises(KernelError, match=f"KvLayout: .*{word}"):
        KvLayout(*sizes)
