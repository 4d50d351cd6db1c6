"""Writes a safetensors file piece by piece: sizes first, then rows in any order, so that no tensor need be whole in memory."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from worker.quantize.errors import QuantizeError

_TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor's type and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.itemsize * prod(self.shape)


class ShardWriter:
    """One file, complete when the context ends without an error: until then it has another name."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorLayout]) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".part")
        self._tensors = dict(tensors)
        self._starts: dict[str, int] = {}
        self._written = dict.fromkeys(tensors, 0)
        end = 0
        entries = {}
        # Wide elements first, so that all are aligned.
        for name, layout in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            self._starts[name] = end
            end += layout.nbytes
            entries[name] = {
                "dtype": _TYPE_NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": [end - layout.nbytes, end],
            }  # fmt: skip
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        self._header = header + b" " * (-len(header) % 8)
        self._num_bytes = end

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb")
        self._file.write(len(self._header).to_bytes(8, "little") + self._header)
        self._file.truncate(8 + len(self._header) + self._num_bytes)
        return self

    def write(self, name: str, values: torch.Tensor, first_row: int = 0) -> None:
        """Some rows, or all of a tensor."""
        layout = self._tensors[name]
        assert values.dtype is layout.dtype
        assert tuple(values.shape[1:]) == layout.shape[1:]
        row_bytes = layout.nbytes // layout.shape[0] if layout.shape and layout.shape[0] else layout.nbytes
        self._file.seek(8 + len(self._header) + self._starts[name] + first_row * row_bytes)
        self._file.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
        self._written[name] += values.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is not None:
                return
            missing = [name for name, layout in self._tensors.items() if self._written[name] != layout.nbytes]
            if missing:
                raise QuantizeError(f"{self._path}: tensor {missing[0]!r} was not written whole")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._partial.replace(self._path)
