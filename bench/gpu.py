"""Checks the kernels for GPUs, and a whole model on them, against their references and times them, on one GPU, in a few minutes.

    python -m bench.gpu [--only kernels|model] [--model PATH]

Kernels have the sizes of an 8-billion-parameter model of the llama family, and so have the layers of the model that is made up, unless another
one is named. Checks come first: numbers against the references in float32, then bits: a row alone, in batches of each size and in a graph. If one
fails, nothing is timed and the exit status is 1. The last things printed are tables.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import gpu_model
from bench.gpu_cases import Case, Sizes, attention_cases, product_cases, small_cases
from bench.gpu_seal_cases import seal_cases
from kernels.backend import Backend, describe, resolve
from kernels.errors import KernelError
from worker.model.cuda_graphs import recorder
from worker.model.errors import ModelError
from worker.model.load import load_model

FULL = Sizes(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, context=4096)
NUM_RUNS = 20
COPY_BYTES = 1 << 30
CACHE_BYTES = 256 << 20  # more than any GPU's second-level cache


def main() -> None:
    """Check, time, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kernels", "model"), help="leave the other part out")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a GGUF file or a folder instead of the made-up model"
    )
    arguments = parser.parse_args()
    try:
        backend = resolve("gpu")
    except KernelError as error:
        sys.exit(f"bench-gpu: {error}")
    if not torch.cuda.is_available():
        sys.exit("bench-gpu: Triton's interpreter is no GPU; unset TRITON_INTERPRET")
    if arguments.model is not None and not arguments.model.exists():
        sys.exit(f"bench-gpu: {arguments.model}: no such file or folder")
    started_s = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {describe(backend)}\n")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s (bytes read and written)\n")
    if arguments.only != "model":
        measure_kernels(bandwidth, device)
    if arguments.only != "kernels":
        with tempfile.TemporaryDirectory(prefix="sluicegate-gpu-") as folder:
            path = arguments.model or gpu_model.made_up(Path(folder) / "made-up")
            try:
                measure_model(path, backend, bandwidth, gpu_model.ModelSizes())
            except (ModelError, torch.OutOfMemoryError) as error:
                sys.exit(f"bench-gpu: {error}")
    print(f"\ntook {time.monotonic() - started_s:.0f} s in all")


def measure_kernels(bandwidth: float, device: torch.device) -> None:
    """Check and time the ops one by one."""
    started_s = time.monotonic()
    results = [check(case) for case in every_case(FULL, device)]
    if not all(results):
        sys.exit("bench-gpu: a check failed, so nothing is timed")
    print(f"\nchecks took {time.monotonic() - started_s:.0f} s\n")
    print(
        "| | us | MB moved | GB/s | of copy bandwidth | torch bf16 us | times as fast |\n|---|---|---|---|---|---|---|"
    )
    for case in every_case(FULL, device):
        print(row(case, bandwidth, device))


def measure_model(path: Path, backend: Backend, bandwidth: float, sizes: gpu_model.ModelSizes) -> None:
    """Check and time a model as a worker runs it."""
    started_s = time.monotonic()
    loaded = load_model(path, backend)
    print(
        f"\n{path.name}: {loaded.model.weight_bytes / 1e6:.0f} MB of weights, loaded in {time.monotonic() - started_s:.1f} s"
    )
    if not gpu_model.check(loaded, load_model(path, Backend.REF), sizes):
        sys.exit("bench-gpu: a check failed, so nothing is timed")
    print(f"checks took {time.monotonic() - started_s:.0f} s with loading\n")
    print("\n".join([gpu_model.TABLE_HEAD, *gpu_model.rows(loaded, bandwidth, sizes)]))


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
    call()  # compiles what it needs
    replay = recorder(device)(call)
    times = []
    for _ in range(NUM_RUNS + 2):
        flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times[2:])


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source), device)


if __name__ == "__main__":
    main()
