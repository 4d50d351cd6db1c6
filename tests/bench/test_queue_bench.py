"""`sluicegate bench queue` measures, reports, and leaves nothing running. What it measures is not judged here."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.queue.report import draw, table, write_json
from bench.queue.rows import Row, percentile

COMMAND = [sys.executable, "-m", "sluicegate", "bench", "queue", "--seconds", "0.5"]


def _processes_of(folder: Path) -> list[str]:
    """Command lines of the processes whose environment names a folder below this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.timeout(180)
def test_a_part_is_measured_and_reported(tmp_path: Path) -> None:
    """Streams through a gateway and beside it: a table, numbers, a picture, and no process is left."""
    run = subprocess.run(
        [*COMMAND, "--only", "streams", "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}, timeout=150,
    )  # fmt: skip
    assert "| tokens/s through one gateway to 64 clients |" in run.stdout
    rows = json.loads((tmp_path / "out" / "queue.json").read_text())["rows"]
    assert rows[0]["gateway"]["per_s"] > 0
    assert rows[0]["bare"]["per_s"] > 0
    assert 0 < rows[1]["writes_per_step"]
    assert (tmp_path / "out" / "queue.png").read_bytes().startswith(b"\x89PNG")
    end_s = time.monotonic() + 20  # a command that was under way ends by itself
    while _processes_of(tmp_path) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [] == _processes_of(tmp_path)
    assert [] == list(tmp_path.glob("sluicegate-bench-*"))


@pytest.mark.timeout(120)
def test_a_terminated_run_ends_what_it_started(tmp_path: Path) -> None:
    """SIGTERM in the middle: exit code 130, no process, no folder."""
    process = subprocess.Popen(
        [*COMMAND, "--only", "scale", "--out", str(tmp_path / "out")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    end_s = time.monotonic() + 60
    while len(_processes_of(tmp_path)) < 4 and time.monotonic() < end_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert 130 == process.wait(60)
    assert [] == _processes_of(tmp_path)
    assert [] == list(tmp_path.glob("sluicegate-bench-*"))


def test_every_kind_of_row_has_its_place(tmp_path: Path) -> None:
    """Met, missed and not measurable; a picture with a panel for each kind of details."""
    rows = [
        Row("latency", "1 ms", "2 ms", True, {"gateway_ms": [1.0, 2.0], "bare_ms": [0.5, 1.0]}),
        Row("tokens", "5/s", "9/s", False, {side: {"per_s": 5.0} for side in ("gateway", "bare", "bare_joined")}),
        Row("flood", "2x", "1.5x", False, {"solo_ms": [1.0, 2.0], "beside_ms": [2.0, 4.0], "ratio": 2.0}),
        Row("scale", "32", "32", True, {"points": [{"workers": 1, "tokens_per_s": 80.0}], "per_worker": 80.0}),
        Row("routing", "95%", "95%", True, {f"routing_{state}": {"hits": 0.5} for state in ("on", "off")}),
        Row("weights", "not measured", "0.95", None),
    ]
    assert ["yes", "NO", "NO", "yes", "yes", "-"] == [
        line.split("|")[-2].strip() for line in table(rows).splitlines()[2:]
    ]
    write_json(rows, tmp_path / "queue.json", (1.0, 1.0, 1.0))
    assert [True, False, False, True, True, None] == [
        row["met"] for row in json.loads((tmp_path / "queue.json").read_text())["rows"]
    ]
    draw(rows, tmp_path / "queue.png")
    assert (tmp_path / "queue.png").stat().st_size > 10_000


def test_percentiles() -> None:
    """Nearest rank, and the largest at the end."""
    assert (50.0, 99.0, 100.0) == tuple(
        percentile([float(n) for n in range(100, 0, -1)], share) for share in (0.49, 0.98, 1.0)
    )
