"""Compiles every Triton kernel for one kind of GPU without having one, and prints what came out as JSON.

    python compiled_code.py 90 [some]

The ops' own wrappers are called, with launches replaced by compilation, so that what is compiled is what would be started. Resource
usage and machine code are read with the cuobjdump and nvdisasm that come with Triton.
"""

import collections
import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from kernels import dense_matmul, fp8_matmul, indexer_topk, int4_matmul, mla_attention, moe, paged_attention
from kernels.add_bias.gpu import add_bias_gpu
from kernels.dense_matmul.gpu import dense_matmul_gpu
from kernels.embedding.gpu import embedding_gpu
from kernels.fp8_matmul.gpu import fp8_matmul_gpu
from kernels.gelu_mul.gpu import gelu_mul_gpu
from kernels.gpu_weights import FP8_GROUP, GpuDenseWeight, GpuFp8Weight, GpuInt4Weight, GpuInt8Weight
from kernels.head_matmul.gpu import head_matmul_gpu
from kernels.head_norm.gpu import head_norm_gpu
from kernels.indexer_topk.gpu import indexer_topk_gpu
from kernels.int4_matmul.gpu import quantized_matmul
from kernels.kv_layout import STORED
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write.gpu import kv_write_gpu
from kernels.layer_norm.gpu import layer_norm_gpu
from kernels.lease_check.gpu import lease_check_gpu
from kernels.mla_attention.gpu import mla_attention_gpu
from kernels.moe import Routing
from kernels.moe.gpu import experts_gpu, route_gpu
from kernels.moe.gpu_experts import GpuExpertMatrices, GpuExperts
from kernels.page_seal.gpu import open_pages_gpu, rekey_pages_gpu, verify_all_reads_gpu, verify_pages_gpu
from kernels.paged_attention.gpu import paged_attention_gpu
from kernels.rms_norm.gpu import rms_norm_gpu
from kernels.rotary.gpu import rotary_gpu
from kernels.seals import PageSeals, SealCheck
from kernels.silu_mul.gpu import silu_mul_gpu

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HIDDEN, FFN = 1024, 4096
# The kernels that differ most between kinds of GPU.
SOME = (
    "int4 rows 1", "int4 rows 2048", "int8 rows 1", "attention decode fp8 128", "attention prefill fp8 128",
    "attention decode fp16 128", "attention prefill fp16 64", "kv_write fp8",
    "attention decode sealed fp16 128", "attention decode sealed fp8 128", "kv_write sealed fp8", "verify reads fp16",
    "experts int4 few", "experts int4 many",
)  # fmt: skip


class AbsentGpu(DriverBase):
    """Tells the compiler what to compile for; nothing can be started on it."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., object]:
        raise NotImplementedError


def describe(cubin: bytes, shared_bytes: int, num_warps: int) -> dict[str, object]:
    """Registers, bytes spilled, and how often each instruction occurs, in all and in the innermost loop with tensor-core products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    found, loop = instructions(code)
    return {
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": shared_bytes,
        "num_warps": num_warps,
        "instructions": collections.Counter(found),
        "loop": collections.Counter(loop),
        "products": sorted({name for name in found if re.match(r"[HUIDQ]\w*MMA", name)}),
    }


def instructions(code: str) -> tuple[list[str], list[str]]:
    """The names of all instructions, and of those in the innermost loop that multiplies tiles."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", line):
            names.append(instruction[1])
            target = re.search(r"`\((\.L_x_\d+)\)", line)
            if instruction[1].startswith("BRA") and target and target[1] in labels:
                loops.append(names[labels[target[1]] :])
    return names, min((body for body in loops if any("MMA" in name for name in body)), key=len, default=[])


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def quantized(kind: type, bits: int, group: int, out: int, width: int, *, minimum: bool) -> GpuInt4Weight:
    """A placed matrix of any numbers."""
    chunk = 32 * 16 // bits
    codes = torch.zeros(-(-width // chunk), out, 32, dtype=torch.int16)
    scales = torch.zeros(-(-width // group), out, dtype=torch.int32 if minimum else torch.float16)
    return kind(codes, scales, (out, width), group, minimum, 1.0)


def product_calls() -> dict[str, Callable[[], object]]:
    """Products with a matrix whose ranges are shared (few rows) or not (many)."""

    def call(multiply: Callable[..., None], weight: object, rows: int) -> Callable[[], object]:
        return lambda: multiply(torch.zeros(rows, weight.shape[1]), weight, torch.zeros(rows, weight.shape[0]))

    calls = {}
    for rows in (1, 2048):
        weight = quantized(GpuInt4Weight, 4, 32, 512, FFN, minimum=True)
        calls[f"int4 rows {rows}"] = call(quantized_matmul, weight, rows)
        weight = quantized(GpuInt8Weight, 8, 32, 512, FFN, minimum=False)
        calls[f"int8 rows {rows}"] = call(quantized_matmul, weight, rows)
        floats = GpuFp8Weight(torch.zeros(512, FFN, dtype=torch.uint8), torch.zeros(FFN // FP8_GROUP, 512), (512, FFN))
        calls[f"fp8 rows {rows}"] = call(fp8_matmul_gpu, floats, rows)
        for dtype in (torch.float16, torch.float32):
            dense = GpuDenseWeight(torch.zeros(512, FFN, dtype=dtype), (512, FFN), 1.0)
            calls[f"{str(dtype).removeprefix('torch.')} rows {rows}"] = call(dense_matmul_gpu, dense, rows)
    return calls


def pool_of(layout: KvLayout, *, is_sealed: bool = False) -> KvPool:
    """A pool as it lies on a GPU, on the CPU."""
    parts, dtype = (layout.num_pages, layout.num_kv_heads, layout.page_size), STORED[layout.dtype]
    k = torch.zeros(layout.num_layers, *parts, layout.head_dim, dtype=dtype)
    v = torch.zeros(layout.num_value_layers, *parts, layout.v_dim, dtype=dtype)
    scale = torch.ones(layout.num_layers, layout.num_kv_heads)
    return KvPool(
        layout, k.transpose(3, 4), v, scale, scale, PageSeals.allocate(bytes(32), layout) if is_sealed else None
    )


def attention_calls() -> dict[str, Callable[[], object]]:
    """Decode rows and a prompt's tiles, for both types of page and two sizes of head."""
    calls = {}
    for dtype in ("bf16", "fp16", "fp8"):
        for dim, heads, kv_heads in ((64, 9, 3), (128, 32, 8))[dtype == "bf16" :]:
            pool = pool_of(KvLayout(1, 4, kv_heads, dim, 16, dtype))
            for name, count in (("decode", 1), ("prefill", 20)):
                calls[f"attention {name} {dtype} {dim}"] = _attend(pool, heads, count)
            calls[f"attention decode sealed {dtype} {dim}"] = _attend(pool_of(pool.layout, is_sealed=True), heads, 1)
    for name, page_size, window in (("window", 16, 100), ("large pages", 64, None)):
        pool = pool_of(KvLayout(1, 4, 8, 128, page_size, "fp16"), is_sealed=True)
        calls[f"attention decode sealed fp16 128 {name}"] = _attend(pool, 32, 1, window)
    return calls


def a_check(num_sequences: int) -> SealCheck:
    """Of a table with 64 pages for each sequence."""
    keys = torch.zeros(num_sequences, 64, dtype=torch.int64)
    return SealCheck(keys, torch.zeros(num_sequences, dtype=torch.int32), torch.zeros(num_sequences, dtype=torch.int64))


def _attend(pool: KvPool, heads: int, count: int, window: int | None = None) -> Callable[[], object]:
    """With seals, if the pool has them."""
    q = torch.zeros(count, heads, pool.layout.head_dim)
    check = None if pool.seals is None else a_check(1)
    rows = AttentionRows(
        torch.zeros(1, 64, dtype=torch.int32), torch.zeros(count, dtype=torch.int32), torch.arange(count).int()
    ).to(torch.device("cpu"))
    return lambda: paged_attention_gpu(q, pool, 0, rows, 0.125, window, check, torch.zeros_like(q))


def latent_calls() -> dict[str, Callable[[], object]]:
    """Latent attention of DeepSeek's sizes, with few rows and with many, of all positions and of selected ones; the indexer; products by head."""
    calls = {}
    device = torch.device("cpu")
    for dtype in ("bf16", "fp8"):
        pool = KvPool.allocate(KvLayout(1, 4, 1, 576, 16, dtype, 128, is_latent=True))
        for name, count in (("decode", 1), ("prefill", 400)):
            rows = AttentionRows(
                torch.zeros(1, 64, dtype=torch.int32), torch.zeros(count, dtype=torch.int32), torch.arange(count).int()
            ).to(device)
            q, turned, out = torch.zeros(count, 64, 512), torch.zeros(count, 64, 64), torch.zeros(count, 64, 512)
            selected = torch.zeros(count, 2048, dtype=torch.int32) if dtype == "fp8" else None
            calls[f"latent {name} {dtype}"] = functools.partial(
                mla_attention_gpu, q, turned, pool, 0, rows, 0.1, selected, None, out
            )
        if dtype == "bf16":
            tables = [
                dataclasses.replace(rows, page_table=torch.zeros(1, width, dtype=torch.int32))
                for width in (16, 64, 256)
            ]
            calls["latent of any width"] = lambda q=q, turned=turned, pool=pool, out=out, tables=tables: [
                mla_attention_gpu(q, turned, pool, 0, table, 0.1, None, None, out) for table in tables
            ]
        index_q, weights, chosen = torch.zeros(1, 32, 128), torch.zeros(1, 32), torch.zeros(1, 16, dtype=torch.int32)
        one = AttentionRows(torch.zeros(1, 64, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32)).to(device)
        calls[f"indexer {dtype}"] = functools.partial(indexer_topk_gpu, index_q, weights, pool, 0, one, None, chosen)
    x, w, out = torch.zeros(3, 64, 128), torch.zeros(64, 512, 128, dtype=torch.bfloat16), torch.zeros(3, 64, 512)
    calls["head_matmul"] = lambda: head_matmul_gpu(x, w, out)
    calls["layer_norm"] = lambda: layer_norm_gpu(x[0], x[0, 0], x[0, 0], 1e-6, torch.zeros_like(x[0]))
    return calls


def seal_calls() -> dict[str, Callable[[], object]]:
    """What keeps and verifies seals beside decode attention."""
    pages, calls = torch.zeros(3, dtype=torch.int64), {}
    x, latent = torch.zeros(3, 8, 128), torch.zeros(3, 1, 576)
    rows = AttentionRows(torch.zeros(1, 64, dtype=torch.int32), *torch.zeros(2, 3, dtype=torch.int32)).to(x.device)
    layouts = {"fp16": KvLayout(2, 4, 8, 128, 16, "fp16"), "fp8": KvLayout(2, 4, 8, 128, 16, "fp8")}
    layouts["latent"] = KvLayout(2, 4, 1, 576, 16, "bf16", 128, (1,), is_latent=True)
    for name, layout in layouts.items():
        pool = pool_of(layout, is_sealed=True)
        row = (latent, latent[:, :, :128]) if layout.is_latent else (x, x)
        calls[f"kv_write sealed {name}"] = functools.partial(kv_write_gpu, *row, pages, pool, 1)
        calls[f"open_pages {name}"] = functools.partial(open_pages_gpu, pool, pages, pages)
        calls[f"verify_pages {name}"] = functools.partial(verify_pages_gpu, pool, pages, pages, pages)
        calls[f"verify reads {name}"] = functools.partial(verify_all_reads_gpu, pool, 1, rows, a_check(1))
    calls["verify reads selected"] = functools.partial(calls["verify reads latent"], selected=torch.zeros(3, 5).int())
    calls["rekey_pages"] = functools.partial(rekey_pages_gpu, pool, pages, pages, pages)
    calls["lease_check"] = lambda: lease_check_gpu(pages, torch.zeros(2, 5).int(), torch.zeros(2, 5).long())
    return calls


def experts_of(one: object) -> GpuExpertMatrices:
    """Eight experts' matrices like this one."""
    numbers = one.matrix if isinstance(one, GpuDenseWeight) else one.codes
    scales = None if isinstance(one, GpuDenseWeight) else one.scales.expand(8, *one.scales.shape).contiguous()
    return GpuExpertMatrices(one, numbers.expand(8, *numbers.shape).contiguous(), scales, torch.ones(8))


def moe_calls() -> dict[str, Callable[[], object]]:
    """Routing in groups, and experts for few rows and for many."""
    routing = Routing(256, 8, "sigmoid", torch.zeros(256), 8, 4, normalize=True)

    def call(gate_up: object, down: object, rows: int) -> Callable[[], object]:
        experts = GpuExperts(experts_of(gate_up), experts_of(down))
        x, chosen = torch.zeros(rows, HIDDEN), torch.arange(8, dtype=torch.int32).repeat(rows, 1)
        return lambda: experts_gpu(x, chosen, torch.ones(rows, 8), experts, x, torch.zeros_like(x))

    four = [quantized(GpuInt4Weight, 4, 32, out, width, minimum=True) for out, width in ((512, HIDDEN), (HIDDEN, 256))]
    dense = [
        GpuDenseWeight(torch.zeros(out, width, dtype=torch.float16), (out, width), 1.0)
        for out, width in ((512, HIDDEN), (HIDDEN, 256))
    ]
    return {
        "route": lambda: route_gpu(torch.zeros(3, 256), routing),
        "experts int4 few": call(*four, 2),
        "experts int4 many": call(*four, 256),
        "experts float16 many": call(*dense, 256),
    }


def small_calls() -> dict[str, Callable[[], object]]:
    """The other ops."""
    x, ids = torch.zeros(3, HIDDEN), torch.zeros(3, dtype=torch.int64)
    heads, table = torch.zeros(3, 8, 128), torch.zeros(16, 2, 64)
    four = quantized(GpuInt4Weight, 4, 32, 512, HIDDEN, minimum=True)
    dense = GpuDenseWeight(torch.zeros(512, HIDDEN, dtype=torch.float16), (512, HIDDEN), 1.0)
    floats = GpuFp8Weight(
        torch.zeros(512, HIDDEN, dtype=torch.uint8), torch.zeros(HIDDEN // FP8_GROUP, 512), (512, HIDDEN)
    )
    pools = {dtype: pool_of(KvLayout(1, 4, 8, 128, 16, dtype)) for dtype in ("bf16", "fp16", "fp8")}
    return {
        "kv_write bf16": lambda: kv_write_gpu(heads, heads, ids, pools["bf16"], 0),
        "kv_write fp16": lambda: kv_write_gpu(heads, heads, ids, pools["fp16"], 0),
        "kv_write fp8": lambda: kv_write_gpu(heads, heads, ids, pools["fp8"], 0),
        "rms_norm": lambda: rms_norm_gpu(x, x[0], 1e-6, torch.zeros_like(x), torch.zeros_like(x)),
        "rotary": lambda: rotary_gpu(heads, ids.int(), table),
        "silu_mul": lambda: silu_mul_gpu(torch.zeros(3, 2 * HIDDEN), x),
        "gelu_mul": lambda: gelu_mul_gpu(torch.zeros(3, 2 * HIDDEN), x),
        "add_bias": lambda: add_bias_gpu(x, x[0]),
        "head_norm": lambda: head_norm_gpu(heads, heads[0, 0], 1e-6),
        "embedding int4": lambda: embedding_gpu(ids, four, x),
        "embedding fp8": lambda: embedding_gpu(ids, floats, x),
        "embedding dense": lambda: embedding_gpu(ids, dense, x),
    }


def main() -> None:
    """Compile all of it and print one JSON object: call -> kernel -> description."""
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(AbsentGpu(capability))
    for op in (int4_matmul, fp8_matmul, dense_matmul, moe, paged_attention, mla_attention, indexer_topk):
        op.gpu.capability = lambda device: capability
        op.gpu.num_processors = lambda device: 100
    kernels: dict[str, object] = {}

    variants: dict[str, set[str]] = {}

    def compile_only(self: JITFunction, *arguments: object, **options: object) -> None:
        compiled = run(self, *arguments, **(options | {"warmup": True}))
        found = describe_once(compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.num_warps)
        variants.setdefault(self.__name__, set()).add(compiled.hash)
        kernels[self.__name__] = found | {"num_variants": len(variants[self.__name__])}

    describe_once = functools.cache(describe)
    run, JITFunction.run = JITFunction.run, compile_only
    report = {}
    calls = product_calls() | attention_calls() | latent_calls() | seal_calls() | moe_calls() | small_calls()
    for name in SOME if sys.argv[2:] == ["some"] else calls:
        call = calls[name]
        kernels.clear()
        variants.clear()
        call()
        report[name] = dict(kernels)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
