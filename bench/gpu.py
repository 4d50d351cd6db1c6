"""Checks every kernel for GPUs against its reference and times it, on one GPU, in a few minutes; the last thing printed is a table.

    python -m bench.gpu

Sizes are those of an 8-billion-parameter model of the llama family. Checks come first: numbers against `ref.py` in float32, then bits: a
row alone, in batches of each size and in a graph. If one fails, nothing is timed and the exit status is 1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.gpu_cases import Case, Sizes, attention_cases, product_cases, small_cases
from bench.gpu_seal_cases import seal_cases
from kernels.backend import describe, resolve
from kernels.errors import KernelError

FULL = Sizes(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, context=4096)
NUM_RUNS = 20
COPY_BYTES = 1 << 30
CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache


def main() -> None:
    """Check, time, print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        backend = resolve("gpu")
    except KernelError as error:
        sys.exit(f"bench-gpu: {error}")
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: Triton's interpreter is no GPU; unset TRITON_INTERPRET")
    started_s = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {describe(backend)}\n")
    device = torch.device("cuda")
    results = [check(case) for case in every_case(FULL, device)]
    if not all(results):
        sys.exit("bench-gpu: a check failed, so nothing is timed")
    print(f"\nchecks took {time.monotonic() - started_s:.0f} s\n")
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s (bytes read and written)\n")
    print(
        "| | us | MB moved | GB/s | of copy bandwidth | torch bf16 us | times as fast |\n|---|---|---|---|---|---|---|"
    )
    for case in every_case(FULL, device):
        print(row(case, bandwidth, device))
    print(f"\ntook {time.monotonic() - started_s:.0f} s in all")


def every_case(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """All ops, one after the other so that the memory of one is free for the next."""
    yield from product_cases(sizes, device)
    yield from attention_cases(sizes, device)
    yield from small_cases(sizes, device)
    yield from seal_cases(sizes, device)


def check(case: Case) -> bool:
    """Print and return whether a case is right."""
    error, is_same = case.error(), case.has_same_bits()
    is_right = error <= case.tolerance and is_same
    bits = "same bits in every batch" if is_same else "BITS DEPEND ON THE BATCH"
    print(f"{'ok  ' if is_right else 'FAIL'} {case.name}: error {error:.1e} of at most {case.tolerance:.0e}, {bits}")
    return is_right


def row(case: Case, bandwidth: float, device: torch.device) -> str:
    """One line of the table."""
    seconds = median_s(case.run, device)
    rate = case.num_bytes / seconds
    theirs = "", ""
    if case.torch_bf16 is not None:
        torch_s = median_s(case.torch_bf16, device)
        theirs = f"{torch_s * 1e6:.1f}", f"{torch_s / seconds:.2f}"
    return (
        f"| {case.name} | {seconds * 1e6:.1f} | {case.num_bytes / 1e6:.1f} | {rate / 1e9:.0f} | {rate / bandwidth:.0%} "
        f"| {theirs[0]} | {theirs[1]} |"
    )


@dataclass(frozen=True, slots=True)
class Flush:
    """Something larger than the cache to overwrite between runs, so that each of them reads memory."""

    memory: torch.Tensor

    def __call__(self) -> None:
        self.memory.zero_()


def median_s(call: Callable[[], object], device: torch.device) -> float:
    """The median duration on the device, from a cold cache, after two calls that aren't counted.

    Calls go through a graph: what's measured is the kernels, not Python.
    """
    flush = Flush(torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device))
    graph = captured(call)
    times = []
    for _ in range(NUM_RUNS + 2):
        flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times[2:])


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A call as a graph, after two that compile what it needs."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        call()
        call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source), device)


if __name__ == "__main__":
    main()
