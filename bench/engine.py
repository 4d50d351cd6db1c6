"""Times the kernels and the engine of this build with the default model, beside the read bandwidth of the same run.

    python -m bench.engine [--model NAME_OR_PATH] [--kv-dtype bf16|fp8]

Prompts are random tokens, sampling is greedy, no prefix is shared. Every figure is a median; compare figures of one run only.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from kernels.backend import Backend, describe, resolve
from kernels.int4_matmul import int4_matmul
from kernels.kv_pool import KvDtype, KvPool
from kernels.weights import Int4Weight
from protocol.ids import GatewayId, ModelName, RequestId, TenantId, WorkerId
from protocol.job import Job, SamplingParams
from sluicegate.model_store import DEFAULT_MODEL
from sluicegate.model_store import resolve as resolve_model
from worker.cache.namespace import NamespaceRing
from worker.engine import Engine, EngineParts
from worker.model.load import LoadedModel, load_model
from worker.model.token_bytes import token_bytes
from worker.model_executor import ModelExecutor

PAGE_SIZE = 16
MAX_SEQUENCES = 32
STEP_TOKENS = 256
NUM_DECODED = 32
FAR_MS = 2**60


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--kv-dtype", choices=("bf16", "fp16", "fp8"), default="fp16")
    arguments = parser.parse_args()
    backend = resolve("cpu")
    name, path = resolve_model(arguments.model)
    loaded = load_model(path, backend)
    bandwidth = read_bandwidth()
    print(f"{name}, {loaded.model.weight_bytes / 1e6:.1f} MB of matrices, KV {arguments.kv_dtype}, {describe(backend)}")
    floor_ms = loaded.model.weight_bytes / bandwidth * 1e3
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, so a decode step takes {floor_ms:.1f} ms at least\n")
    print_products(backend)
    print_engine(loaded, arguments.kv_dtype, floor_ms)


def median_s(call: Callable[[], object], num_runs: int) -> float:
    """The median duration of a call, after one that isn't counted."""
    call()
    times = []
    for _ in range(num_runs):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second at which all threads read memory: a float32 sum over 256 MB."""
    numbers = torch.ones(64 * 1024 * 1024)
    return numbers.nbytes / median_s(numbers.sum, 9)


def print_products(backend: Backend) -> None:
    """Products with 60 matrices of 3072 x 576, 4 bits, group 32: more than the caches hold."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(3072, 18, generator=generator).half()
    codes = torch.randint(0, 16, (3072, 576), dtype=torch.uint8, generator=generator)
    weights = [Int4Weight.from_codes(codes, scale, -scale, 32) for _ in range(60)]
    num_bytes = sum(weight.nbytes for weight in weights)
    print("| rows | ms | GB/s of weights | GOP/s |\n|---|---|---|---|")
    for num_rows in (1, 2, 4, 8, 16, 32, 512):
        x = torch.randn(num_rows, 576, generator=generator)
        seconds = median_s(partial(_multiply, x, weights, backend), 5 if num_rows > 64 else 15)
        operations = 2 * num_rows * 60 * 3072 * 576
        print(
            f"| {num_rows} | {seconds * 1e3:.1f} | {num_bytes / seconds / 1e9:.1f} | {operations / seconds / 1e9:.0f} |"
        )


def _multiply(x: torch.Tensor, weights: list[Int4Weight], backend: Backend) -> None:
    for weight in weights:
        int4_matmul(x, weight, backend=backend)


def print_engine(loaded: LoadedModel, kv_dtype: KvDtype, floor_ms: float) -> None:
    """Prefill, and decode steps of one stream at several contexts and of several streams."""
    print("\n| | tokens/s | ms a step | of the floor |\n|---|---|---|---|")
    for length in (512, 1000, 4000):
        seconds, _ = run(loaded, kv_dtype, 1, length)
        print(f"| prefill of {length} tokens | {length / seconds:.0f} | | |")
    for num_streams, length in ((1, 128), (1, 1000), (1, 4000), (8, 128), (16, 128), (32, 128)):
        _, step_s = run(loaded, kv_dtype, num_streams, length)
        rate = num_streams / step_s
        print(
            f"| decode, {num_streams} streams at {length} | {rate:.0f} | {step_s * 1e3:.1f} | {step_s * 1e3 / floor_ms:.1f}x |"
        )


def run(loaded: LoadedModel, kv_dtype: KvDtype, num_streams: int, length: int) -> tuple[float, float]:
    """Seconds until all prompts are computed, and of a decode step in the median."""
    engine = new_engine(loaded, kv_dtype, num_streams * (length + NUM_DECODED + PAGE_SIZE))
    for job in jobs(num_streams, length):
        engine.submit(job)
    started_s = time.perf_counter()
    while engine.totals.generated_tokens == 0 or any(s.num_remaining > 1 for s in engine.scheduler.running):
        engine.step()
    prefill_s = time.perf_counter() - started_s
    steps = []
    while engine.has_work:
        step_started_s = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - step_started_s)
    return prefill_s, statistics.median(steps[: NUM_DECODED // 2])


def new_engine(loaded: LoadedModel, kv_dtype: KvDtype, kv_tokens: int) -> Engine:
    """An engine with the worker's defaults and room for all streams at once."""
    num_pages = -(-kv_tokens // PAGE_SIZE) + MAX_SEQUENCES
    layout = loaded.kv_layout(num_pages, PAGE_SIZE, kv_dtype)
    parts = EngineParts(
        executor=ModelExecutor(loaded.model, KvPool.allocate(layout), Backend.CPU),
        namespaces=NamespaceRing(b"b" * 32, loaded.digest, kv_dtype),
        token_bytes=tuple(token_bytes(loaded.tokenizer)),
        eos_token_ids=frozenset(loaded.tokenizer.eos_token_ids),
        max_request_tokens=num_pages * PAGE_SIZE,
        worker_id=WorkerId("bench"),
        checks_leases=True,
        now=time.monotonic,
        now_ms=lambda: 0,
    )
    return Engine(parts, MAX_SEQUENCES, STEP_TOKENS)


def jobs(num_streams: int, length: int) -> Iterable[Job]:
    """One job for each stream, all different."""
    sampling = SamplingParams(max_tokens=NUM_DECODED, seed=0, temperature=0.0, ignore_eos=True)
    for number in range(num_streams):
        ids = tuple(int(token) for token in np.random.default_rng(number).integers(100, 40_000, length))
        yield Job(RequestId(f"r{number}"), GatewayId("g"), TenantId("t"), ModelName("m"), ids, sampling, 0, FAR_MS)


if __name__ == "__main__":
    main()
