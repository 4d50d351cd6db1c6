"""How much memory quantizing takes beside the largest file of the source: `python -m bench.streaming FOLDER --shard-mb 512 --shards 4`.

Writes a synthetic checkpoint into the folder, shaped like a large model's (matrices of some tens of megabytes, an embedding that is a file of its own), quantizes it
in a process of its own, and prints the peak of resident memory above that of the process before it began. With `--kill-at 0.5` that process is killed when half is done,
and another one goes on. All of it is removed again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker.quantize.job import Options, prepare

COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class Run:
    """One process: bytes of the source done in it, its peak of memory above that before it began, seconds of CPU time up to its last report."""

    done_bytes: int
    extra_peak_bytes: int
    cpu_s: float
    is_killed: bool


@dataclass(frozen=True, slots=True)
class Streaming:
    """Bytes, and the processes that it took."""

    source_bytes: int
    largest_file_bytes: int
    result_bytes: int
    runs: tuple[Run, ...]

    @property
    def extra_peak_bytes(self) -> int:
        """Of the process that took most."""
        return max(run.extra_peak_bytes for run in self.runs)

    def figures(self) -> dict[str, object]:
        """All of it, for a file."""
        peak = self.extra_peak_bytes
        return asdict(self) | {"extra_peak_bytes": peak, "ratio": peak / self.largest_file_bytes}


def measure(
    folder: Path, shard_bytes: int, num_shards: int, matrix_bytes: int, policy: str, kill_at: float | None
) -> Streaming:
    """The folder must not exist yet. `kill_at` is a share of the source's bytes."""
    source, result = folder / "source", folder / "result"
    source.mkdir(parents=True)
    try:
        sizes = _write(source, shard_bytes, num_shards, matrix_bytes)
        runs = []
        if kill_at is not None:
            runs.append(_run(source, result, policy, round(kill_at * sum(sizes))))
        runs.append(_run(source, result, policy, None))
        size = sum(path.stat().st_size for path in result.iterdir())
        return Streaming(sum(sizes), max(sizes), size, tuple(runs))
    finally:
        shutil.rmtree(folder)


def _run(source: Path, result: Path, policy: str, kill_at_bytes: int | None) -> Run:
    """Quantize in a new process, until it ends or, given a number of bytes, until it has told of as many."""
    command = [sys.executable, "-m", "bench.streaming", str(source), "--quantize-into", str(result), "--policy", policy]
    peak_bytes, done_bytes, cpu_s = 0, 0, 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            more, peak_bytes, cpu_s = json.loads(line)
            done_bytes += more
            if kill_at_bytes is not None and done_bytes >= kill_at_bytes:
                process.kill()
                break
        process.stdout.close()
    is_killed = process.returncode == -9
    if process.returncode and not (is_killed and kill_at_bytes is not None):
        raise subprocess.CalledProcessError(process.returncode, command)
    return Run(done_bytes, peak_bytes, cpu_s, is_killed)


def _quantize(source: Path, result: Path, policy: str) -> None:
    """What the process of its own does: a line for each matrix with its bytes, the peak of memory so far and the CPU time."""
    job = prepare(source, Options(policy=policy))
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    started_s = time.process_time()

    def tell(more: int) -> None:
        print(json.dumps([more, _status("VmHWM") - before, time.process_time() - started_s]), flush=True)

    job.run(result, tell)
    tell(0)


def _write(folder: Path, shard_bytes: int, num_shards: int, matrix_bytes: int) -> list[int]:
    random = torch.Generator().manual_seed(1)
    rows = matrix_bytes // 2 // COLUMNS
    matrix = torch.empty(rows, COLUMNS, dtype=torch.bfloat16).normal_(generator=random)
    per_shard = max(1, shard_bytes // matrix.nbytes)
    weight_map: dict[str, str] = {}
    sizes = []
    for number in range(num_shards + 1):
        name = f"model-{number:05d}.safetensors"
        if number == 0:
            tensors = {"model.embed_tokens.weight": matrix.repeat(per_shard, 1)}
        else:
            tensors = {
                f"model.layers.{number}.mlp.experts.{i}.up_proj.weight": matrix.roll(i) for i in range(per_shard)
            }
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        sizes.append((folder / name).stat().st_size)
    config = {"model_type": "synthetic", "n_routed_experts": per_shard}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return sizes


def _status(field: str) -> int:
    """A size from the kernel's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder that isn't there yet")
    parser.add_argument("--shard-mb", type=int, default=512)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--matrix-mb", type=int, default=32)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--kill-at", type=float, metavar="SHARE", help="of the source, done when the process is killed")
    parser.add_argument("--quantize-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quantize_into:
        _quantize(arguments.folder, arguments.quantize_into, arguments.policy)
        return
    sizes = arguments.shard_mb << 20, arguments.shards, arguments.matrix_mb << 20
    print(json.dumps(measure(arguments.folder, *sizes, arguments.policy, arguments.kill_at).figures()))


if __name__ == "__main__":
    main()
