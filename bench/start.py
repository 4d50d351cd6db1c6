"""Real workers: how long `sluicegate worker` takes until it's ready, and what it holds in memory then."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.engines.serve import memory
from bench.results import WorkerResult

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_TORCH = "import torch; from bench.engines.serve import memory; print(memory()['resident'])"

# Gives the URL of a server that runs for as long as the context lasts.
Queue = Callable[[Path], AbstractContextManager[str]]


def measure_worker(queue: Queue, arguments: Sequence[str], num_starts: int) -> WorkerResult:
    """Start a worker several times, one after the other, after one start that isn't counted."""
    result = WorkerResult(torch_bytes=_torch_bytes())
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as folder, queue(Path(folder)) as url:
        for number in range(num_starts + 1):
            try:
                ready_s = _start(url, Path(folder), arguments, result)
            except RuntimeError as error:
                result.error = str(error)
                break
            if number:
                result.ready_s.append(ready_s)
    return result


def _torch_bytes() -> int:
    printed = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, check=True)
    return int(printed.stdout)


def _start(url: str, data: Path, arguments: Sequence[str], result: WorkerResult) -> float:
    """Seconds until the worker says that it's ready; its memory goes into the result."""
    command = [sys.executable, "-m", "sluicegate", "worker", "--data", str(data), "--redis-url", url, *arguments]
    # Not through a pipe that nobody empties afterwards: the log goes on.
    log = data / "worker.log"
    started_s = time.perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stderr=errors, env={**os.environ, "SLUICEGATE_LOG_LEVEL": "info", "SLUICEGATE_KERNELS": "cpu"}
        )
    try:
        events = _wait_for_ready(process, log, started_s + READY_TIMEOUT_S)
        ready_s = time.perf_counter() - started_s
        held = memory(process.pid)
        result.resident_bytes, result.peak_bytes = held["resident"], held["peak"]
        result.kv_bytes = next(event["kv_bytes"] for event in events if event.get("event") == "model_loaded")
        return ready_s
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_ready(process: "subprocess.Popen[bytes]", log: Path, deadline_s: float) -> list[dict[str, Any]]:
    while True:
        events = _events(log)
        if any(event.get("event") == "worker_ready" for event in events):
            return events
        if process.poll() is not None or time.perf_counter() > deadline_s:
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise RuntimeError(f"the worker does not become ready: {' '.join(last)[:300]}")
        time.sleep(0.01)


def _events(log: Path) -> list[dict[str, Any]]:
    events = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line may not be whole yet
        if isinstance(event, dict):
            events.append(event)
    return events
