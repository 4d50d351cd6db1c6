"""What will be written, known before anything is: each file of the result, each tensor in it, and what that comes to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from worker.quantize.errors import QuantizeError
from worker.quantize.packing import num_packed
from worker.quantize.policy import Policy, kind_of, module_of, quantization_config
from worker.quantize.rounding import Precision
from worker.quantize.shard_writer import TensorLayout
from worker.quantize.source import SINGLE, Source, SourceTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the result and the source's tensors that go into it."""

    file: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KindTotal:
    """Matrices that differ in their layer or expert only."""

    kind: str
    count: int
    precision: Precision | None
    source_bytes: int
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Files in their order, the precision of each quantized module, and what config.json says of it."""

    shards: tuple[Shard, ...]
    precisions: Mapping[str, Precision]
    scale_dtype: torch.dtype
    quantization_config: dict[str, Any] | None
    totals: tuple[KindTotal, ...]

    def layouts(self, source: Source, name: str) -> dict[str, TensorLayout]:
        """The tensors of the result that a tensor of the source becomes."""
        module = module_of(name)
        precision = self.precisions.get(module) if module else None
        layout = source.tensors[name].layout
        if module is None or precision is None:
            return {name: layout}
        rows, columns = layout.shape
        groups = columns // precision.group_size
        found = {
            f"{module}.weight_packed": TensorLayout(torch.int32, (rows, num_packed(columns, precision.bits))),
            f"{module}.weight_scale": TensorLayout(self.scale_dtype, (rows, groups)),
            f"{module}.weight_shape": TensorLayout(torch.int64, (2,)),
        }
        if not precision.is_symmetric:
            found[f"{module}.weight_zero_point"] = TensorLayout(torch.int32, (num_packed(rows, precision.bits), groups))
        return found


def make_plan(source: Source, policy: Policy, shard_bytes: int | None) -> Plan:
    """Files as the source has them, or, given a size, tensors in the order of layers up to that size (a file holds one tensor at least).

    Raises QuantizeError for tensors that can't make a result.
    """
    if not source.tensors:
        raise QuantizeError(f"{source.label}: holds no tensors")
    precisions: dict[str, Precision] = {}
    others = []
    for name, tensor in source.tensors.items():
        module = module_of(name)
        precision = policy.precision(module, tensor.layout) if module else None
        if module and precision:
            precisions[module] = precision
        elif module and len(tensor.layout.shape) == 2:
            others.append(module)
    # The files' sizes decide how tensors are grouped, which needs their layouts, which need no files.
    plan = Plan((), precisions, _scale_dtype(source), None, ())
    names = Counter(name for tensor in source.tensors for name in plan.layouts(source, tensor))
    if len(names) < names.total():
        raise QuantizeError(f"{source.label}: tensor {names.most_common(1)[0][0]!r} would be in the result twice")
    sizes = {name: sum(layout.nbytes for layout in plan.layouts(source, name).values()) for name in source.tensors}
    shards = _as_stored(source) if shard_bytes is None else _by_size(source, sizes, shard_bytes)
    settings = quantization_config(precisions, others) if precisions else None
    return Plan(shards, precisions, plan.scale_dtype, settings, _totals(source, precisions, sizes))


def _scale_dtype(source: Source) -> torch.dtype:
    """The 16-bit type that most matrices have, so that every engine reads scales as they are; bfloat16, with the same range, for float32."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in source.tensors.values():
        if len(tensor.layout.shape) >= 2:
            sizes[tensor.layout.dtype] = sizes.get(tensor.layout.dtype, 0) + tensor.layout.nbytes
    return torch.float16 if max(sizes, key=lambda kind: sizes[kind], default=None) is torch.float16 else torch.bfloat16


def _as_stored(source: Source) -> tuple[Shard, ...]:
    files: dict[str, list[str]] = {}
    for name, tensor in source.tensors.items():
        files.setdefault(tensor.file, []).append(name)
    return tuple(Shard(file, tuple(names)) for file, names in files.items())


def _by_size(source: Source, sizes: Mapping[str, int], shard_bytes: int) -> tuple[Shard, ...]:
    shards: list[list[str]] = []
    room = 0
    for name in sorted(source.tensors, key=_place):
        if not shards or sizes[name] > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= sizes[name]
    if len(shards) == 1:
        return (Shard(SINGLE, tuple(shards[0])),)
    total = len(shards)
    return tuple(
        Shard(f"model-{number:05d}-of-{total:05d}.safetensors", tuple(names)) for number, names in enumerate(shards, 1)
    )


def _place(name: str) -> tuple[int, int, str]:
    """Embeddings, then layer by layer, then the rest."""
    layer = layer_of(name)
    if layer is None:
        return (0 if "embed" in name else 2, 0, name)
    return (1, layer, name)


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to."""
    parts = name.split(".")
    for part, following in pairwise(parts):
        if part == "layers" and following.isdecimal():
            return int(following)
    return None


def _totals(source: Source, precisions: Mapping[str, Precision], sizes: Mapping[str, int]) -> tuple[KindTotal, ...]:
    found: dict[tuple[str, Precision | None], list[SourceTensor]] = {}
    results: dict[tuple[str, Precision | None], int] = {}
    for name, tensor in source.tensors.items():
        module = module_of(name)
        precision = precisions.get(module) if module else None
        kind = (
            kind_of(name).replace("\\d+", "*").replace("\\", "") if len(tensor.layout.shape) >= 2 else "norms, biases"
        )
        key = (kind.removesuffix(".weight"), precision)
        found.setdefault(key, []).append(tensor)
        results[key] = results.get(key, 0) + sizes[name]
    return tuple(
        KindTotal(
            kind, len(tensors), precision, sum(tensor.layout.nbytes for tensor in tensors), results[kind, precision]
        )
        for (kind, precision), tensors in found.items()
    )


def shown(totals: Sequence[KindTotal]) -> str:
    """The plan as a table for people."""
    width = max(len(total.kind) for total in totals)
    lines = [f"{'MATRICES':<{width}} {'COUNT':>6}  {'PRECISION':<22} {'FROM':>10} {'TO':>10}"]
    for total in totals:
        precision = "as it is" if total.precision is None else str(total.precision)
        lines.append(
            f"{total.kind:<{width}} {total.count:>6}  {precision:<22} {_size(total.source_bytes):>10} {_size(total.result_bytes):>10}"
        )
    before, after = sum(total.source_bytes for total in totals), sum(total.result_bytes for total in totals)
    lines.append(f"{'total':<{width}} {'':>6}  {'':<22} {_size(before):>10} {_size(after):>10}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
