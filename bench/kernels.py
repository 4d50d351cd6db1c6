"""The matrix products alone, at batches from 1 to 512 rows."""

from functools import partial

import torch

from bench.bandwidth import median_s
from bench.table import table
from kernels.backend import Backend
from kernels.int4_matmul import int4_matmul
from kernels.weights import Int4Weight

NUM_MATRICES, ROWS, COLUMNS, GROUP = 60, 3072, 576, 32


def products(backend: Backend) -> str:
    """Products with 60 matrices of 3072 x 576, 4 bits, group 32, as a table: more than the caches hold."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(ROWS, COLUMNS // GROUP, generator=generator).half()
    codes = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8, generator=generator)
    weights = [Int4Weight.from_codes(codes, scale, -scale, GROUP) for _ in range(NUM_MATRICES)]
    num_bytes = sum(weight.nbytes for weight in weights)
    rows = []
    for num_rows in (1, 2, 4, 8, 16, 32, 512):
        x = torch.randn(num_rows, COLUMNS, generator=generator)
        seconds = median_s(partial(_multiply, x, weights, backend), 5 if num_rows > 64 else 15)
        operations = 2 * num_rows * NUM_MATRICES * ROWS * COLUMNS
        numbers = (seconds * 1e3, num_bytes / seconds / 1e9, operations / seconds / 1e9)
        rows.append([str(num_rows), *(f"{number:.1f}" for number in numbers)])
    return table(["rows", "ms", "GB/s of weights", "GOP/s"], rows)


def _multiply(x: torch.Tensor, weights: list[Int4Weight], backend: Backend) -> None:
    for weight in weights:
        int4_matmul(x, weight, backend=backend)
