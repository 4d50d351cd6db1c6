"""The whole of it: from a source and settings to a folder that loads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from worker.quantize.errors import QuantizeError
from worker.quantize.manifest import MANIFEST, Manifest, digest_of, only_writer, open_result, write_whole
from worker.quantize.packing import packed_parts
from worker.quantize.plan import Plan, Shard
from worker.quantize.policy import module_of
from worker.quantize.rounding import Precision, Quantized, rounded_to_nearest
from worker.quantize.shard_writer import ShardWriter
from worker.quantize.source import CONFIG, INDEX, SINGLE, Source

# Of a matrix, worked on at a time: 2 MB in float32, and ten times that while scales are searched.
CHUNK_ELEMENTS = 1 << 19
Progress = Callable[[int], None]  # told how many bytes of the source more are done


class Method(Protocol):
    """How matrices become codes."""

    def rows(self, name: str, precision: Precision) -> Iterator[Quantized]:
        """A matrix of the source, some rows at a time from the first on; all but the last a multiple of 8 rows. Raises QuantizeError."""
        ...


class RoundToNearest:
    """Each matrix by itself, a few rows at a time."""

    def __init__(self, source: Source, scale_dtype: torch.dtype) -> None:
        self._source = source
        self._scale_dtype = scale_dtype

    def rows(self, name: str, precision: Precision) -> Iterator[Quantized]:
        """See `Method.rows`."""
        for _, values in chunks(self._source, name):
            yield rounded_to_nearest(values.float(), precision, self._scale_dtype)


def chunks(source: Source, name: str) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor by rows: where each part begins, and its values, checked to be finite. Raises QuantizeError."""
    shape = source.tensors[name].layout.shape
    num_rows = shape[0] if shape else 1
    step = max(8, CHUNK_ELEMENTS // max(1, source_row_elements(shape)) // 8 * 8)
    for first in range(0, num_rows, step):
        values = source.rows(name, first, min(first + step, num_rows))
        if values.dtype.is_floating_point and not bool(torch.isfinite(values).all()):
            raise QuantizeError(f"{source.label}: tensor {name!r} has values that are not finite")
        yield first, values


def source_row_elements(shape: tuple[int, ...]) -> int:
    """Elements in a row."""
    return torch.Size(shape[1:]).numel()


def quantize(
    source: Source, plan: Plan, method: Method, folder: Path, settings: dict[str, Any], progress: Progress
) -> None:
    """Write the result, or what is missing of it. Raises QuantizeError and OSError; what is finished then stays for the next run."""
    _check_apart(source, folder)
    with only_writer(folder):
        manifest = open_result(folder, settings)
        for left in folder.glob("*.part"):
            left.unlink()
        manifest.check_source(source.files())
        finished = {shard.file for shard in plan.shards if manifest.finished(shard.file)}
        for shard in plan.shards:
            if shard.file not in finished:
                (folder / shard.file).unlink(missing_ok=True)
        for shard in plan.shards:
            if shard.file not in finished:
                _record_source(manifest, source, shard)
                _write_shard(source, plan, method, folder / shard.file, shard, progress)
                manifest.result[shard.file] = digest_of(folder / shard.file)
                manifest.write()
            else:
                progress(sum(source.tensors[name].layout.nbytes for name in shard.tensors))
        _finish(source, plan, folder, manifest)


def _record_source(manifest: Manifest, source: Source, shard: Shard) -> None:
    files = source.files()
    for name in {
        CONFIG,
        *(source.tensors[tensor].file for tensor in shard.tensors),
    } & files.keys() - manifest.source.keys():
        manifest.source[name] = digest_of(files[name])
    manifest.write()


def _write_shard(source: Source, plan: Plan, method: Method, path: Path, shard: Shard, progress: Progress) -> None:
    layouts = {name: layout for tensor in shard.tensors for name, layout in plan.layouts(source, tensor).items()}
    with ShardWriter(path, layouts) as writer:
        for name in shard.tensors:
            module = module_of(name)
            precision = plan.precisions.get(module) if module else None
            if module is None or precision is None:
                for first, values in chunks(source, name):
                    writer.write(name, values, first)
                    progress(values.nbytes)
            else:
                _write_matrix(
                    writer, module, source.tensors[name].layout.shape, method.rows(name, precision), precision
                )
                progress(source.tensors[name].layout.nbytes)


def _write_matrix(
    writer: ShardWriter, module: str, shape: tuple[int, ...], parts: Iterator[Quantized], precision: Precision
) -> None:
    writer.write(f"{module}.weight_shape", torch.tensor(shape))
    first = 0
    for rows in parts:
        for ending, values in packed_parts(rows, precision).items():
            is_packed_down = ending == "weight_zero_point"
            writer.write(f"{module}.{ending}", values, first * precision.bits // 32 if is_packed_down else first)
        first += len(rows.codes)


def _finish(source: Source, plan: Plan, folder: Path, manifest: Manifest) -> None:
    """All that is not weights; config.json last, without which the folder is no model."""
    for name in source.write_companions(folder):
        manifest.result[name] = digest_of(folder / name)
    if [shard.file for shard in plan.shards] != [SINGLE]:
        weight_map, total = {}, 0
        for shard in plan.shards:
            for tensor in shard.tensors:
                for name, layout in plan.layouts(source, tensor).items():
                    weight_map[name] = shard.file
                    total += layout.nbytes
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder, INDEX, index, manifest)
    config = dict(source.config)
    if plan.quantization_config is not None:
        config["quantization_config"] = plan.quantization_config
    _write_json(folder, CONFIG, config, manifest)
    manifest.is_complete = True
    manifest.write()


def _write_json(folder: Path, name: str, content: dict[str, Any], manifest: Manifest) -> None:
    write_whole(folder / name, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    manifest.result[name] = digest_of(folder / name)


def _check_apart(source: Source, folder: Path) -> None:
    result, origin = folder.resolve(), Path(source.label).resolve()
    if result == origin or origin in result.parents or result in origin.parents:
        raise QuantizeError(f"{folder}: lies in the source, or the source in it; name another folder")
    if folder.is_file():
        raise QuantizeError(f"{folder}: is a file")


__all__ = ["MANIFEST", "Method", "Progress", "RoundToNearest", "chunks", "quantize"]
