"""How fast this machine reads memory: what a decode step's time is held against."""

import statistics
import time
from collections.abc import Callable

import torch

NUM_BYTES = 256 * 1024 * 1024  # several times the largest cache
NUM_RUNS = 9


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
    """Bytes a second at which all of torch's threads read memory: the fastest of three plain reductions over 256 MB.

    A floor that is computed from it is a little too low rather than too high: no single loop is the fastest on every machine.
    """
    numbers = torch.ones(NUM_BYTES // 4)
    reductions = (numbers.sum, numbers.max, lambda: torch.dot(numbers, numbers))
    return NUM_BYTES / min(median_s(call, NUM_RUNS) for call in reductions)
