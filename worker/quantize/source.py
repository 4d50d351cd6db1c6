"""What is quantized: tensors by their Hugging Face names, a few rows at a time, with the files that go along."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from protocol.model_card import TokenizerSpec
from worker.model.errors import ModelError
from worker.model.folder import inside, read_json
from worker.model.folder_tokenizer import tokenizer_from_folder
from worker.quantize.errors import QuantizeError
from worker.quantize.shard_writer import DTYPES, TensorLayout

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
_FP8_SCALE = "_scale_inv"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# What goes along with the weights: tokenizer, templates, processors, licences, and code that some tokenizers are made of.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as it's given out, and the file that it comes from."""

    layout: TensorLayout
    file: str


class Source(Protocol):
    """A checkpoint that can be quantized."""

    label: str

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json of the result, without quantization_config."""
        ...

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """All tensors, in the order of their files."""
        ...

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of a tensor (all of a scalar), of the type in its layout. Raises QuantizeError."""
        ...

    def files(self) -> Mapping[str, Path]:
        """The files that weights and configuration are read from, by name."""
        ...

    def tokenizer(self) -> TokenizerSpec:
        """The tokenizer. Raises QuantizeError."""
        ...

    def write_companions(self, folder: Path) -> list[str]:
        """Write the files that go along with the weights; returns their names."""
        ...


class FolderSource:
    """A folder in Hugging Face's layout: bf16, f16 or f32, or FP8 in blocks, which is given out as bf16."""

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._folder = folder
        try:
            self.config = read_json(folder, CONFIG)
            self._files = _weight_files(folder)
            self._companions = _companions(folder)
            self._block = _fp8_block(self.config, self.label)
            stored = self._stored()
        except ModelError as error:
            raise QuantizeError(str(error)) from None
        self.config.pop("quantization_config", None)
        self.tensors = {name: tensor for name, tensor in stored.items() if not self._is_scale(name, stored)}
        self._scales = {name: tensor for name, tensor in stored.items() if name not in self.tensors}
        self._check_fp8()

    def files(self) -> Mapping[str, Path]:
        """See `Source.files`."""
        return {CONFIG: self._folder / CONFIG} | {file.name: file for file in self._files}

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """See `Source.rows`."""
        tensor = self.tensors[name]
        values = self._read(tensor.file, name, first, last)
        scale_name = name + _FP8_SCALE
        if values.dtype is torch.float8_e4m3fn and scale_name in self._scales and self._block is not None:
            height, width = self._block
            from_row, to_row = first // height, -(-last // height)
            scale = self._read(self._scales[scale_name].file, scale_name, from_row, to_row).float()
            scale = scale.repeat_interleave(height, 0)[first - from_row * height :][: last - first]
            values = values.float() * scale.repeat_interleave(width, 1)[:, : values.shape[1]]
        return values.to(tensor.layout.dtype)

    def tokenizer(self) -> TokenizerSpec:
        """See `Source.tokenizer`."""
        try:
            text = self.config.get("text_config")
            size = (text if isinstance(text, dict) else self.config).get("vocab_size")
            return tokenizer_from_folder(self._folder, size if type(size) is int else 0, self.config)
        except ModelError as error:
            raise QuantizeError(str(error)) from None

    def write_companions(self, folder: Path) -> list[str]:
        """See `Source.write_companions`."""
        for name in self._companions:
            shutil.copyfile(self._folder / name, folder / name)
        return self._companions

    def _stored(self) -> dict[str, SourceTensor]:
        found: dict[str, SourceTensor] = {}
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():
                        if name in found:
                            raise QuantizeError(
                                f"{self.label}: tensor {name!r} is in {found[name].file} and in {file.name}"
                            )
                        view = opened.get_slice(name)
                        dtype = DTYPES.get(view.get_dtype())
                        if dtype is None:
                            raise QuantizeError(
                                f"{file}: tensor {name!r} has type {view.get_dtype()}, which is not known"
                            )
                        found[name] = SourceTensor(TensorLayout(dtype, tuple(view.get_shape())), file.name)
            except (SafetensorError, OSError, ValueError) as error:
                raise QuantizeError(f"{file}: cannot be read: {error}") from None
        return found

    def _is_scale(self, name: str, stored: Mapping[str, SourceTensor]) -> bool:
        return self._block is not None and name.endswith(_FP8_SCALE) and name.removesuffix(_FP8_SCALE) in stored

    def _check_fp8(self) -> None:
        """FP8 matrices have scales of the right shape, and are bf16 from here on."""
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            if tensor.layout.dtype in {torch.float8_e4m3fn, torch.float8_e5m2}:
                scale = self._scales.get(name + _FP8_SCALE)
                if scale is None or self._block is None or len(tensor.layout.shape) != 2:
                    raise QuantizeError(f"{self.label}: tensor {name!r} is FP8, but has no scales of blocks")
                rows, columns = tensor.layout.shape
                wanted = (-(-rows // self._block[0]), -(-columns // self._block[1]))
                if scale.layout.shape != wanted or scale.layout.dtype not in _FLOATS:
                    raise QuantizeError(
                        f"{self.label}: tensor {name + _FP8_SCALE!r} must be {list(wanted)} floats, got {list(scale.layout.shape)}"
                    )
                tensors[name] = SourceTensor(TensorLayout(torch.bfloat16, tensor.layout.shape), tensor.file)
        self.tensors = tensors

    def _read(self, file: str, name: str, first: int, last: int) -> torch.Tensor:
        try:
            # Opened anew each time: a mapping that stays counts every page that was ever read as this process' memory.
            with safe_open(self._folder / file, framework="pt") as opened:
                view = opened.get_slice(name)
                shape = view.get_shape()
                values: torch.Tensor = view[first:last] if shape else opened.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise QuantizeError(f"{self._folder / file}: tensor {name!r} cannot be read: {error}") from None
        return values


def _weight_files(folder: Path) -> list[Path]:
    if inside(folder, INDEX).is_file():
        index = read_json(folder, INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
            raise ModelError(f"{folder / INDEX}: has no weight_map")
        files = [inside(folder, name) for name in sorted(set(index.values()))]
    else:
        files = [inside(folder, SINGLE)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: no such file")
    return files


def _companions(folder: Path) -> list[str]:
    """Names of the files that go along. Looked for at once: one that can't be taken is told before the work, not after it. Raises ModelError."""
    found = {path.name for pattern in _COMPANIONS for path in folder.glob(pattern)}
    wanted = sorted(found - {CONFIG, INDEX, "sluicegate-quantize.json"})
    return [name for name in wanted if not name.endswith(".safetensors.index.json") and inside(folder, name).is_file()]


def _fp8_block(config: dict[str, Any], label: str) -> tuple[int, int] | None:
    """The size of FP8's blocks, or None for a checkpoint that isn't quantized."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method != "fp8":
        raise QuantizeError(
            f"{label}: is quantized already ({str(method)[:50]}); start from the 16-bit checkpoint, or one in FP8 with blocks"
        )
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise QuantizeError(f"{label}: weight_block_size {str(block)[:50]} is not supported: two sizes are expected")
    return block[0], block[1]
