"""How much memory quantizing takes beside the largest file of the source: `python -m bench.streaming FOLDER --shard-mb 512 --shards 4`.

Writes a synthetic checkpoint into the folder, shaped like a large model's (matrices of some tens of megabytes, an embedding that is a file of its own), quantizes it
in this process, and prints the peak of resident memory above that of the process when it started. All of it is removed again.
"""

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker.quantize.job import Options, prepare

COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class Streaming:
    """Bytes, and seconds of CPU time."""

    source_bytes: int
    largest_file_bytes: int
    result_bytes: int
    extra_peak_bytes: int
    cpu_s: float

    @property
    def ratio(self) -> float:
        """Peak memory by the largest file."""
        return self.extra_peak_bytes / self.largest_file_bytes


def measure(folder: Path, shard_bytes: int, num_shards: int, matrix_bytes: int, options: Options) -> Streaming:
    """The folder must not exist yet."""
    source = folder / "source"
    source.mkdir(parents=True)
    try:
        sizes = _write(source, shard_bytes, num_shards, matrix_bytes)
        job = prepare(source, options)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
        started_s = time.process_time()
        job.run(folder / "result", lambda more: None)
        peak = _status("VmHWM")
        result = sum(path.stat().st_size for path in (folder / "result").iterdir())
        return Streaming(sum(sizes), max(sizes), result, peak - before, time.process_time() - started_s)
    finally:
        shutil.rmtree(folder)


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
    arguments = parser.parse_args()
    found = measure(
        arguments.folder,
        arguments.shard_mb << 20,
        arguments.shards,
        arguments.matrix_mb << 20,
        Options(policy=arguments.policy),
    )
    print(json.dumps(asdict(found) | {"ratio": found.ratio}))


if __name__ == "__main__":
    main()
