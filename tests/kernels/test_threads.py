"""Ops called from several threads at once, and a pool that changes its size between calls."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.int4_matmul import int4_matmul

ROOT = Path(__file__).parents[2]


def test_callers_in_several_threads_do_not_mix(make_int4):
    """Each caller gets its own result while others compute other sizes."""
    weights = [make_int4(16 * (index + 1), 64) for index in range(4)]
    inputs = [torch.randn(3 + 9 * index, 64) for index in range(4)]
    expected = [int4_matmul(x, w, backend=Backend.CPU) for x, w in zip(inputs, weights, strict=True)]

    def call(index: int) -> bool:
        return all(
            torch.equal(expected[index], int4_matmul(inputs[index], weights[index], backend=Backend.CPU))
            for _ in range(100)
        )

    with ThreadPoolExecutor(4) as executor:
        assert [True] * 4 == list(executor.map(call, range(4)))


def test_pool_can_change_its_size(make_int4):
    """Growing and shrinking loses no work, and the count is the one asked for."""
    x, w = torch.randn(9, 64), make_int4(100, 64)
    expected = int4_matmul(x, w, backend=Backend.CPU)
    for count in (1, 5, 2, 1, 3):
        _native.set_num_threads(count)
        assert count == _native.num_threads()
        assert torch.equal(expected, int4_matmul(x, w, backend=Backend.CPU))


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("num_outputs", [16, 70, 333])
def test_products_have_the_same_bits_however_they_are_cut(make_int4, threads: int, num_outputs: int) -> None:
    """Rows and panels are shared out by their number and the threads': a row's bits depend on neither, and nothing beside the output is written."""
    weights, x = make_int4(num_outputs, 64), torch.randn(70, 64)
    _native.set_num_threads(1)
    alone = torch.cat([int4_matmul(row[None], weights, backend=Backend.CPU) for row in x])
    _native.set_num_threads(threads)
    for num_rows in range(71):
        assert torch.equal(alone[:num_rows], int4_matmul(x[:num_rows], weights, backend=Backend.CPU)), num_rows


def test_sleeping_threads_wake_up(make_int4):
    """After a pause that puts the pool to sleep the next call is as right as the first."""
    x, w = torch.randn(9, 64), make_int4(100, 64)
    expected = int4_matmul(x, w, backend=Backend.CPU)
    for _ in range(20):
        torch.randn(300, 300) @ torch.randn(300, 300)  # longer than the pool spins
        assert torch.equal(expected, int4_matmul(x, w, backend=Backend.CPU))


def test_process_ends_with_a_pool_at_rest():
    """A process that used the pool exits at once and cleanly."""
    code = (
        "import torch\n"
        "from kernels.backend import Backend, describe, resolve\n"
        "from kernels.rms_norm import rms_norm\n"
        "backend = resolve('auto')\n"
        "rms_norm(torch.ones(2000, 64), torch.ones(64), 1e-6, backend=backend)\n"
        "print(describe(backend)['threads'])\n"
    )
    environment = {**os.environ, "SLUICEGATE_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (0, "3\n", "") == (done.returncode, done.stdout, done.stderr)


def test_loops_of_changing_sizes_follow_each_other_without_loss(make_int4) -> None:
    """Far more threads than cores, and loops of few and many pieces in turn: late threads neither lose nor repeat a piece."""
    weights = [make_int4(num_rows, 32, 32) for num_rows in (32, 640, 48, 112)]
    x = torch.randn(1, 32)
    expected = [int4_matmul(x, weight, backend=Backend.CPU) for weight in weights]
    _native.set_num_threads(16)
    for number in range(60_000):
        actual = int4_matmul(x, weights[number % 4], backend=Backend.CPU)
        assert torch.equal(expected[number % 4], actual)
