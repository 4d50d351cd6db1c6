"""The header of a safetensors file, checked before anything is read by it: an 8-byte length, a JSON object, then the tensors' bytes.

Format: https://github.com/huggingface/safetensors#format. Stricter than the reference in one thing: a name that comes twice is an error.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from worker.model.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000  # as in the reference
_MAX_DIMENSIONS = 8
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `start` counts from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(descriptor: int, label: str) -> dict[str, StoredTensor]:
    """The tensors of an opened file by name; `label` names it. Nothing is allocated that the file doesn't hold. Raises ModelError."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little") if size >= 8 else -1
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{label}: is no safetensors file: it has {size} bytes, its header claims {length}")
    tensors = _tensors(_json(os.pread(descriptor, length, 8), label), 8 + length, label)
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != end:
            raise ModelError(f"{label}: tensor {name!r} begins at byte {tensor.start}, where {end} is expected")
        end += tensor.num_bytes
    if end != size:
        raise ModelError(f"{label}: has {size} bytes, its tensors end at {end}")
    return tensors


def _json(raw: bytes, label: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ModelError(f"{label}: {name[:200]!r} is in the header twice")
            found[name] = value
        return found

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{label}: its header cannot be read as JSON: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{label}: its header must be a JSON object")
    return value


def _tensors(header: dict[str, Any], first: int, label: str) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not name.isprintable() or not 0 < len(name) <= 500:
            raise ModelError(f"{label}: {name[:100]!r} is no tensor name")
        tensors[name] = _tensor(entry, first, f"{label}: tensor {name!r}")
    return tensors


def _tensor(entry: Any, first: int, label: str) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{label} has no dtype, shape and data_offsets in the header")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ModelError(f"{label} has type {str(kind)[:50]!r}, which is not supported")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{label} has no valid shape and data_offsets in the header")
    num_bytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelError(
            f"{label} has shape {shape} of {kind}, which takes {num_bytes} bytes, in {offsets[1] - offsets[0]}"
        )
    return StoredTensor(dtype, tuple(shape), first + offsets[0], num_bytes)


def _are_sizes(numbers: Any) -> bool:
    """Whether it's a list of non-negative integers below 2^53."""
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 53 for number in numbers)
