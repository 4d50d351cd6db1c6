"""The script that checks and times kernels on a GPU: its checks, run in Triton's interpreter, and what it says without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import check, every_case
from bench.gpu_cases import Case, Sizes

pytestmark = pytest.mark.timeout(400)  # the interpreter on a busy machine

ROOT = Path(__file__).parents[2]
SMALL = Sizes(hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, context=36, many=20, streams=3, batches=(1, 17))


@pytest.mark.usefixtures("ordered_products")
def test_every_check_passes_in_the_interpreter(capsys):
    """Each case runs, agrees with its reference, and gives rows the same bits in every batch."""
    names = []
    for case in every_case(SMALL, torch.device("cpu")):
        names.append(case.name)
        assert check(case), capsys.readouterr().out
    for op in (
        "int4",
        "int8",
        "bf16",
        "attention decode",
        "attention prefill",
        "kv_write",
        "rms_norm",
        "silu_mul",
        "rotary",
        "verified attention decode",
        "verified attention prefill",
        "verify_pages",
    ):
        assert any(name.startswith(op) for name in names)


def test_a_check_can_fail(capsys):
    """An error beyond the tolerance, NaN, or bits that depend on the batch are failures."""
    fine = Case("op", 1e-3, 1, lambda: None, lambda: 0.0, lambda: True)
    assert check(fine)
    for bad in (
        Case("op", 1e-3, 1, lambda: None, lambda: 2e-3, lambda: True),
        Case("op", 1e-3, 1, lambda: None, lambda: float("inf"), lambda: True),
        Case("op", 1e-3, 1, lambda: None, lambda: 0.0, lambda: False),
    ):
        assert not check(bad)
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("interpreting", "message"), [("0", "torch sees no GPU here"), ("1", "interpreter is no GPU")])
def test_without_a_gpu_it_says_so_in_one_line(interpreting, message):
    """No table, no traceback: one line and a failure."""
    environment = os.environ | {"TRITON_INTERPRET": interpreting}
    command = [sys.executable, "-m", "bench.gpu"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
