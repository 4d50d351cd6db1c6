"""What `bench.gpu` checks and times: for each op and size how to run it, what it moves, what is right, and what torch would take."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.dense_matmul import dense_matmul
from kernels.fp8_matmul import fp8_matmul
from kernels.int4_matmul import int4_matmul
from kernels.int8_matmul import int8_matmul
from kernels.kv_pool import AttentionRows, KvDtype, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.placement import place
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rotary.ref import rotary_table
from kernels.silu_mul import silu_mul
from kernels.weights import DenseWeight, Fp8Weight, Int4Weight, Int8Weight, Weight

GPU, REF = Backend.GPU, Backend.REF
TOLERANCES = {"16-bit product": 6e-4, "bf16": 4e-3, "fp16": 4e-4, "fp8": 4e-4, "float32": 2e-6, "bytes": 0.0}
BATCHES = (1, 2, 16, 17, 64, 65, 200)
MANY = 2048
PAGE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model; `context` is the number of keys of each sequence."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    many: int = MANY
    streams: int = 32
    batches: tuple[int, ...] = BATCHES


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size. `error` is relative (root mean square) against the reference; bytes must be equal."""

    name: str
    tolerance: float
    num_bytes: int
    run: Callable[[], object]
    error: Callable[[], float]
    has_same_bits: Callable[[], bool]
    torch_bf16: Callable[[], object] | None = None


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error over that of what's right; infinite for NaN."""
    wide, right = actual.double().cpu(), expected.double().cpu()
    error = (wide - right).square().mean().sqrt() / right.square().mean().sqrt()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


Multiply = Callable[..., torch.Tensor]


def product_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Products with matrices of each kind, for few rows and for many."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "qkv": ((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden),
        "down": (sizes.hidden, sizes.ffn),
    }
    for name, (num_out, num_in) in shapes.items():
        scale = 0.01 + 0.1 * torch.rand(num_out, num_in // 32, generator=generator)
        codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)
        four = Int4Weight.from_codes(codes, scale.half(), (-8 * scale).half(), 32)
        yield from _products(f"int4 {name}", int4_matmul, four, sizes, device)
        if name == "qkv":
            signed = (codes.short() * 17 - 128).to(torch.int8)
            eight = Int8Weight.from_codes(signed, scale.half(), None, 32)
            yield from _products(f"int8 {name}", int8_matmul, eight, sizes, device)
            codes = torch.randn(num_out, num_in, generator=generator).to(torch.float8_e4m3fn)
            groups = torch.rand(num_out, -(-num_in // 128), generator=generator) + 0.5
            yield from _products(f"fp8 {name}", fp8_matmul, Fp8Weight.from_codes(codes, groups), sizes, device)
            dense = DenseWeight.from_matrix(torch.randn(num_out, num_in, generator=generator).bfloat16())
            yield from _products(f"bf16 {name}", dense_matmul, dense, sizes, device)


def _products(name: str, multiply: Multiply, weight: Weight, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    placed = place(weight, GPU)
    num_out, num_in = weight.shape
    theirs = weight.dequantize().bfloat16().to(device)
    for rows in (1, 16, sizes.many):
        x = torch.randn(rows, num_in, generator=torch.Generator().manual_seed(rows)).to(device)
        out = torch.empty(rows, num_out, device=device)
        narrow = x.bfloat16()
        yield Case(
            name=f"{name} {num_out}x{num_in}, {rows} rows",
            tolerance=TOLERANCES["16-bit product"],
            num_bytes=placed.nbytes + x.nbytes + out.nbytes,
            run=functools.partial(multiply, x, placed, out, backend=GPU),
            error=functools.partial(_product_error, multiply, x, placed, weight),
            has_same_bits=functools.partial(
                _rows_agree, functools.partial(multiply, w=placed, backend=GPU), x, sizes.batches
            ),
            torch_bf16=functools.partial(torch.nn.functional.linear, narrow, theirs),
        )


def _product_error(multiply: Multiply, x: torch.Tensor, placed: object, weight: Weight) -> float:
    some = x[:64].contiguous()
    return relative_error(multiply(some, placed, backend=GPU), multiply(some.cpu(), weight, backend=REF))


def _rows_agree(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, batches: tuple[int, ...]) -> bool:
    """Whether rows have the same bits in batches of other sizes as in the largest."""
    together = compute(x)
    for size in batches:
        if size <= len(x):
            last = x[len(x) - size :].contiguous()
            if not torch.equal(together[len(x) - size :], compute(last)):
                return False
    return True


def attention_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Decode of few and many sequences, and a chunk of a prompt, over pages of each type."""
    for dtype in ("fp16", "bf16", "fp8"):
        for num_sequences in (1, sizes.streams):
            yield _attention(f"decode {dtype}, {num_sequences} sequences", sizes, dtype, num_sequences, 1, device)
        yield _attention(f"prefill {dtype}, 256 rows", sizes, dtype, 1, min(256, sizes.context), device)


def _attention(
    name: str, sizes: Sizes, dtype: KvDtype, num_sequences: int, num_rows: int, device: torch.device
) -> Case:
    torch.manual_seed(0)
    pages = -(-sizes.context // PAGE)
    layout = KvLayout(1, num_sequences * pages, sizes.kv_heads, sizes.head_dim, PAGE, dtype)
    host = KvPool.allocate(layout)
    for side in (host.k, host.v):
        numbers = torch.randn(side.shape)
        side.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8) if dtype == "fp8" else numbers)
    pool = KvPool.allocate(layout, backend=GPU)
    pool.k.copy_(host.k)
    pool.v.copy_(host.v)
    table = torch.randperm(num_sequences * pages, dtype=torch.int32).view(num_sequences, pages)
    sequence = torch.arange(num_sequences, dtype=torch.int32).repeat_interleave(num_rows)
    position = torch.arange(sizes.context - num_rows, sizes.context, dtype=torch.int32).repeat(num_sequences)
    rows = AttentionRows(table, sequence, position)
    q = torch.randn(len(sequence), sizes.heads, sizes.head_dim).to(device)
    placed, out = rows.to(device), torch.empty_like(q)
    scale = sizes.head_dim**-0.5
    attend = functools.partial(paged_attention, pool=pool, layer=0, softmax_scale=scale, backend=GPU)
    token_bytes = 2 * sizes.kv_heads * sizes.head_dim * layout.element_bytes
    return Case(
        name=f"attention {name} at {sizes.context}",
        tolerance=TOLERANCES[dtype],
        num_bytes=num_sequences * sizes.context * token_bytes + 2 * q.nbytes,
        run=functools.partial(attend, q, rows=placed, out=out),
        error=functools.partial(_attention_error, attend, q, rows, host, scale),
        has_same_bits=functools.partial(_attention_agrees, attend, q, rows),
        torch_bf16=_torch_attention(sizes, num_sequences, num_rows, device),
    )


def _some(rows: AttentionRows, chosen: list[int]) -> AttentionRows:
    return AttentionRows(rows.page_table, rows.row_sequence[chosen], rows.row_position[chosen])


def _attention_error(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, rows: AttentionRows, host: KvPool, scale: float
) -> float:
    """Of the first and the last row: the reference takes its time."""
    chosen = sorted({0, len(q) - 1})
    actual = attend(q, rows=rows.to(q.device))[chosen]
    right = paged_attention(q[chosen].cpu(), host, 0, _some(rows, chosen), softmax_scale=scale, backend=REF)
    return relative_error(actual, right)


def _attention_agrees(attend: Callable[..., torch.Tensor], q: torch.Tensor, rows: AttentionRows) -> bool:
    """Whether rows have the same bits alone and in chunks as all together."""
    together, count = attend(q, rows=rows.to(q.device)), len(q)
    parts = [[0], [count - 1], list(range(count // 2)), list(range(count // 3, count))]
    return all(
        torch.equal(together[part], attend(q[part], rows=_some(rows, part).to(q.device))) for part in parts if part
    )


def _torch_attention(sizes: Sizes, num_sequences: int, num_rows: int, device: torch.device) -> Callable[[], object]:
    """Over keys and values that lie in one piece, in bfloat16; its own causal order, which a chunk makes little of."""
    ratio = sizes.heads // sizes.kv_heads
    shape = (num_sequences, sizes.kv_heads, sizes.context, sizes.head_dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(num_sequences, sizes.heads, num_rows, sizes.head_dim, device=device, dtype=torch.bfloat16)
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=ratio > 1)


def small_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Cache writes, norm, rotary embedding and gate, for a batch of decode rows."""
    rows = 64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, sizes.hidden, generator=generator)
    weight = torch.randn(sizes.hidden, generator=generator)
    norm = functools.partial(rms_norm, weight=weight.to(device), eps=1e-5, backend=GPU)
    yield _row_case("rms_norm", norm, rms_norm(x, weight, 1e-5, backend=REF), x, sizes, device)
    gate_up = torch.randn(rows, 2 * sizes.ffn, generator=generator)
    gate = functools.partial(silu_mul, backend=GPU)
    yield _row_case("silu_mul", gate, silu_mul(gate_up, backend=REF), gate_up, sizes, device)
    yield _rotary_case(sizes, rows, device)
    for dtype in ("fp16", "bf16", "fp8"):
        yield _write_case(sizes, dtype, rows, device)


def _row_case(
    name: str, compute: Callable[[torch.Tensor], torch.Tensor], right: torch.Tensor, x: torch.Tensor, sizes: Sizes,
    device: torch.device,
) -> Case:  # fmt: skip
    there = x.to(device)
    return Case(
        name=f"{name}, {len(x)} rows of {x.shape[1]}",
        tolerance=TOLERANCES["float32"],
        num_bytes=x.nbytes + right.nbytes,
        run=functools.partial(compute, there),
        error=lambda: relative_error(compute(there), right),
        has_same_bits=functools.partial(_rows_agree, compute, there, sizes.batches),
    )


def _rotary_case(sizes: Sizes, rows: int, device: torch.device) -> Case:
    table = rotary_table(torch.rand(sizes.head_dim // 2), 8192)
    x, positions = torch.randn(rows, sizes.heads, sizes.head_dim), torch.randint(0, 8192, (rows,), dtype=torch.int32)
    right, there, places, turns = x.clone(), x.to(device), positions.to(device), table.to(device)
    rotary(right, positions, table, backend=REF)

    def turned() -> torch.Tensor:
        result = there.clone()
        rotary(result, places, turns, backend=GPU)
        return result

    return Case(
        name=f"rotary, {rows} rows of {sizes.heads} heads",
        tolerance=TOLERANCES["float32"],
        num_bytes=2 * x.nbytes,
        run=functools.partial(rotary, there.clone(), places, turns, backend=GPU),
        error=lambda: relative_error(turned(), right),
        has_same_bits=lambda: torch.equal(turned(), turned()),
    )


def _write_case(sizes: Sizes, dtype: KvDtype, rows: int, device: torch.device) -> Case:
    """Every stored byte must be the reference's."""
    layout = KvLayout(1, rows, sizes.kv_heads, sizes.head_dim, PAGE, dtype)
    host, pool = KvPool.allocate(layout), KvPool.allocate(layout, backend=GPU)
    k = torch.randn(rows, sizes.kv_heads, sizes.head_dim) * 300
    slots = torch.randperm(rows * PAGE)[:rows]
    kv_write(k, -k, slots, host, 0, backend=REF)
    there, other, places = k.to(device), (-k).to(device), slots.to(device)
    write = functools.partial(kv_write, there, other, places, pool, 0, backend=GPU)

    def error() -> float:
        write()
        is_same = torch.equal(host.k, pool.k.cpu())
        return 0.0 if is_same and torch.equal(host.v, pool.v.cpu()) else 1.0

    return Case(
        name=f"kv_write {dtype}, {rows} rows",
        tolerance=TOLERANCES["bytes"],
        num_bytes=2 * k.nbytes + 2 * rows * sizes.kv_heads * sizes.head_dim * layout.element_bytes,
        run=write,
        error=error,
        has_same_bits=lambda: True,
    )
