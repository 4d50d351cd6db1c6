"""Peak memory stays under twice the largest file of the source, though that's many times the model's largest matrix or just one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Threads that wait for each other on a busy machine cost more than they give.
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("matrix_mb", [4, 64], ids=["many matrices in a file", "one matrix a file"])
def test_peak_memory(matrix_mb: int, tmp_path: Path) -> None:
    """In a process of its own. Experts get 4 bits here, which takes the most memory while scales are searched."""
    sizes = ["--shard-mb", "64", "--shards", "1", "--matrix-mb", str(matrix_mb)]
    command = [sys.executable, "-m", "bench.streaming", str(tmp_path / "work"), *sizes]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3], env=ONE_THREAD
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["largest_file_bytes"] >= 64 << 20
    assert found["result_bytes"] < 0.75 * found["source_bytes"]
    assert 0 < found["extra_peak_bytes"] < 2 * found["largest_file_bytes"]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """The first process dies with part of the source done, the second ends it."""
    sizes = ["--shard-mb", "8", "--shards", "3", "--matrix-mb", "1", "--kill-at", "0.6"]
    command = [sys.executable, "-m", "bench.streaming", str(tmp_path / "work"), *sizes]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3], env=ONE_THREAD
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    killed, whole = found["runs"]
    assert [True, False] == [killed["is_killed"], whole["is_killed"]]
    assert 0.6 * found["source_bytes"] <= killed["done_bytes"] < found["source_bytes"]
    assert not (tmp_path / "work").exists()
