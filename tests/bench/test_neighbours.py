"""Other processes' share of the cores."""

import subprocess
import sys

from bench.neighbours import CpuTimes

SPIN = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"


def test_work_of_children_is_ours_and_arithmetic_holds() -> None:
    """What a child that we wait for computes counts as our own."""
    before = CpuTimes.now()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    after = CpuTimes.now()

    assert after.own_s - before.own_s > 0.2
    assert after.busy_s > before.busy_s


def test_share() -> None:
    """Three of eight seconds of two cores were ours, one was others'."""
    assert 0.125 == CpuTimes(4.0, 104.0, 53.0).share_of_others(CpuTimes(0.0, 100.0, 50.0), 2)
    assert 0.0 == CpuTimes(4.0, 100.0, 53.0).share_of_others(CpuTimes(0.0, 100.0, 50.0), 2)
