"""How fast a checkpoint is loaded, beside how fast `dd` reads its files: from the disk, and again from the page cache.

Each load is a process of its own, which reports the time from opening the checkpoint to a model that can serve, digest included, and the
memory that it held at most. Before a reading from the disk the kernel is asked to forget the files (no privilege is needed for that).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.synthetic_checkpoint import Shape, write_checkpoint

_DD = shutil.which("dd") or "dd"
_LOAD = """
import json, sys, time
from pathlib import Path
from bench.engines.serve import memory
from kernels.backend import resolve
from worker.model.load import load_model
backend, before = resolve(sys.argv[2]), memory()["resident"]
started_s = time.perf_counter()
loaded = load_model(Path(sys.argv[1]), backend)
seconds = time.perf_counter() - started_s
print(json.dumps({"seconds": seconds, "grown": memory()["peak"] - before, "weights": loaded.model.weight_bytes}))
"""


class LoadError(Exception):
    """A checkpoint that doesn't load; the message is what the loading process said last."""


@dataclass(slots=True)
class LoadTimes:
    """Seconds by round, and bytes."""

    num_bytes: int
    dd_s: dict[str, list[float]] = field(default_factory=lambda: {"disk": [], "cache": []})
    load_s: dict[str, list[float]] = field(default_factory=lambda: {"disk": [], "cache": []})
    weight_bytes: int = 0
    peak_bytes: int = 0  # beyond what the process held before

    def ratio(self, place: str) -> float:
        """The load's speed by dd's, as the median over rounds."""
        return statistics.median(dd / load for dd, load in zip(self.dd_s[place], self.load_s[place], strict=True))


def measure(path: Path | None, kernels: str, rounds: int) -> LoadTimes:
    """Take turns with dd. Without a path, a random INT4 checkpoint is made up for it, half a gigabyte in a temporary folder."""
    if path is not None:
        return _measure(path, kernels, rounds)
    with tempfile.TemporaryDirectory(prefix="sluicegate-load-") as folder:
        made_up = Path(folder) / "checkpoint"
        write_checkpoint(made_up, Shape())
        return _measure(made_up, kernels, rounds)


def _measure(path: Path, kernels: str, rounds: int) -> LoadTimes:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    times = LoadTimes(sum(file.stat().st_size for file in files))
    for _ in range(rounds):
        for place in ("disk", "cache"):
            _prepare(files, place)
            times.dd_s[place].append(_dd(files))
            _prepare(files, place)
            _load(path, kernels, place, times)
    return times


def _prepare(files: list[Path], place: str) -> None:
    """Have the files nowhere but on the disk, or in the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if place == "disk":
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(1 << 24):
                    pass


def _dd(files: list[Path]) -> float:
    started_s = time.perf_counter()
    for file in files:
        subprocess.run([_DD, f"if={file}", "of=/dev/null", "bs=4M", "status=none"], check=True)
    return time.perf_counter() - started_s


def _load(path: Path, kernels: str, place: str, times: LoadTimes) -> None:
    command = [sys.executable, "-c", _LOAD, str(path), kernels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise LoadError(f"{path}: the load failed: {' '.join(last)[:500]}")
    report = json.loads(done.stdout)
    times.load_s[place].append(report["seconds"])
    times.weight_bytes = report["weights"]
    times.peak_bytes = max(times.peak_bytes, report["grown"])


def table(times: LoadTimes) -> str:
    """Markdown."""
    lines = [f"{times.num_bytes / 1e6:.0f} MB in files, {times.weight_bytes / 1e6:.0f} MB of weights in memory", ""]
    lines += ["| files come from | dd, MB/s | load, MB/s | load / dd |", "|---|---|---|---|"]
    for place, title in (("disk", "the disk"), ("cache", "the page cache")):
        dd, load = (times.num_bytes / 1e6 / statistics.median(seconds[place]) for seconds in (times.dd_s, times.load_s))
        lines.append(f"| {title} | {dd:.0f} | {load:.0f} | {times.ratio(place):.2f} |")
    lines += ["", f"Memory grew by {times.peak_bytes / times.weight_bytes:.2f} of the weights at most."]
    return "\n".join(lines)
