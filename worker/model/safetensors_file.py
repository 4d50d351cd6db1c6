"""A folder in Hugging Face's layout (config.json, *.safetensors, tokenizer.json) as a checkpoint. Nothing outside the folder is opened."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.model.architectures import folder_config
from worker.model.checkpoint import Checkpoint
from worker.model.errors import ModelError
from worker.model.folder_tokenizer import tokenizer_from_folder
from worker.model.tensors import Rows

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in the folder; raises ModelError."""
    path = folder / name
    try:
        value = json.loads(inside(folder, name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return value


def inside(folder: Path, name: str) -> Path:
    """The path of a regular file, there or not, in the folder itself, links followed; raises ModelError for any other."""
    path = folder / name
    if not name.isprintable() or len(name.encode()) > 255 or Path(name).name != name:
        raise ModelError(f"{folder}: {name[:100]!r} is no file name")
    if path.resolve().parent != folder.resolve():
        raise ModelError(f"{folder}: {name!r} lies outside the model folder")
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ModelError(f"{path}: is no regular file")
    return path


class SafetensorsSource:
    """Tensors of one or more safetensors files."""

    def __init__(self, folder: Path, files: list[Path], index: dict[str, str] | None) -> None:
        self.label = str(folder)
        self._files = {file.name: self._open(file) for file in files}
        self._places: dict[str, str] = {}
        for file_name, file in self._files.items():
            for name in file.keys():
                if name in self._places:
                    raise ModelError(f"{folder}: tensor {name!r} is in {self._places[name]} and in {file_name}")
                self._places[name] = file_name
        for name, file_name in (index or {}).items():
            if self._places.get(name) != file_name:
                raise ModelError(f"{folder}: tensor {name!r} is not in {file_name}, where the index says")

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from None

    def names(self) -> Iterable[str]:
        """All tensors."""
        return self._places

    def read_expert(self, name: str, shape: tuple[int, ...], expert: int) -> Rows:
        """One expert's part of a tensor in its own precision."""
        whole = self.read(name, shape)
        assert isinstance(whole, torch.Tensor)
        return whole[expert]

    def read(self, name: str, shape: tuple[int, ...]) -> Rows:
        """A tensor in its own precision."""
        file_name = self._places.get(name)
        if file_name is None:
            raise ModelError(f"{self.label}: tensor {name!r} is missing")
        tensor = self._files[file_name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.label}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{self.label}: tensor {name!r} has type {tensor.dtype}, which is not supported")
        return tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)


def open_folder(folder: Path) -> Checkpoint:
    """Read configuration and tokenizer, and check that all shards are there. Raises ModelError."""
    raw = read_json(folder, "config.json")
    found, config = folder_config(raw, str(folder / "config.json"))
    files, index = _files(folder)
    ignored = frozenset({found.tensor_name("head", None)} if config.tie_embeddings else ())
    rotary = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)}
    return Checkpoint(
        config=config,
        tokenizer=tokenizer_from_folder(folder, config.vocab_size, raw),
        source=SafetensorsSource(folder, files, index),
        tensor_name=found.tensor_name,
        digest=_digest(folder, files),
        label=str(folder),
        ignored=ignored | rotary,
        ignored_prefixes=found.ignored(config),
    )


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    if (folder / _INDEX).exists():
        index = read_json(folder, _INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()) or not index:
            raise ModelError(f"{folder / _INDEX}: has no weight_map")
        files = [inside(folder, name) for name in sorted(set(index.values()))]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: is in the index, but not in the folder")
        return files, index
    single = inside(folder, _SINGLE)
    if not single.is_file():
        raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
    return [single], None


def _digest(folder: Path, files: list[Path]) -> str:
    """A hash over the names and contents of everything that the model is made of."""
    total = hashlib.sha256()
    for file in [folder / "config.json", folder / "tokenizer.json", *files]:
        with file.open("rb") as opened:
            total.update(file.name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()
