"""The tensors of one or more safetensors files, read one at a time."""

from collections.abc import Iterable
from pathlib import Path

import torch

from worker.model.errors import ModelError
from worker.model.opened_file import OpenedFile
from worker.model.safetensors_header import StoredTensor, read_header

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorFile:
    """One file, with what its header says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = OpenedFile(path)
        try:
            self.tensors = read_header(self._file.descriptor, str(path))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None

    def read(self, start: int, num_bytes: int) -> torch.Tensor:
        """Some bytes, uint8 [num_bytes]. Raises ModelError if the file has none there any more."""
        return torch.from_numpy(self._file.read(start, num_bytes))


class TensorFiles:
    """Tensors by name. `index` says which file holds which, where there are several."""

    def __init__(self, folder: Path, paths: list[Path], index: dict[str, str] | None) -> None:
        self.label = str(folder)
        self.files = [TensorFile(path) for path in paths]
        self._places: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._places:
                    raise ModelError(
                        f"{folder}: tensor {name!r} is in {self._places[name].path.name} and in {file.path.name}"
                    )
                self._places[name] = file
        for name, file_name in (index or {}).items():
            if name not in self._places or self._places[name].path.name != file_name:
                raise ModelError(f"{folder}: tensor {name!r} is not in {file_name}, where the index says")

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._places

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def entry(self, name: str) -> StoredTensor:
        """What the header says of a tensor. Raises ModelError if there's none."""
        if name not in self._places:
            raise ModelError(f"{self.label}: tensor {name!r} is missing")
        return self._places[name].tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, in its own type."""
        entry = self.entry(name)
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = self._places[name].read(entry.start, entry.num_bytes)
        return raw.view(entry.dtype).view(entry.shape)

    def read_rows(self, name: str, index: int, rows: range) -> torch.Tensor:
        """Adjacent rows of a matrix [index] of a tensor of three dimensions; nothing else is read."""
        entry = self.entry(name)
        num_rows, num_cols = entry.shape[1:]
        row_bytes = num_cols * entry.dtype.itemsize
        start = entry.start + (index * num_rows + rows.start) * row_bytes
        raw = self._places[name].read(start, len(rows) * row_bytes)
        return raw.view(entry.dtype).view(len(rows), num_cols)

    def read_checked(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: Iterable[torch.dtype] = FLOATS,
    ) -> torch.Tensor:
        """A whole tensor that must have this shape and one of these types."""
        entry, wanted = self.entry(name), tuple(dtypes)
        if entry.shape != shape:
            raise ModelError(f"{self.label}: tensor {name!r} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype not in wanted:
            raise ModelError(f"{self.label}: tensor {name!r} has type {entry.dtype}, which is not supported here")
        return self.read(name)
