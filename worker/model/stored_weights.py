"""A checkpoint's weights under the names that a plain one would give them, whatever tensors they are stored in.

`x.weight` may be a plain matrix, `x.weight_packed` with scales, `x.qweight` with scales and zero points, one expert's part of a fused
tensor. Each of the stored tensors belongs to exactly one weight, or stands under its own name and is unknown if nobody asks for it.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from worker.kv_scales import KvScales
from worker.model.awq import read_awq
from worker.model.compressed_tensors import read_packed, read_plain
from worker.model.errors import ModelError
from worker.model.fp8 import read_fp8
from worker.model.gptq import read_gptq
from worker.model.quantization_config import Quantization, Scheme
from worker.model.stored_kv_scales import kv_scales
from worker.model.tensor_files import FLOATS, TensorFiles
from worker.model.tensors import Rows

# Which tensors of a module go with its main one, by what the main one is.
_PARTS = {
    "packed": {"weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"},
    "int8": {"weight_scale", "weight_zero_point", "weight_g_idx"},
    "fp8": {"weight_scale", "weight_scale_inv"},
    "columns": {"qzeros", "scales", "g_idx"},
    "plain": set[str](),
}
_MAIN = {"weight_packed": "packed", "qweight": "columns"}
_METHODS = {
    "packed": ("compressed-tensors",), "int8": ("compressed-tensors",), "fp8": ("compressed-tensors", "fp8"),
    "columns": ("gptq", "awq"),
}  # fmt: skip
_TYPES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}  # of a `weight` that isn't plain
# Scales for activations of 8 bits: activations keep more here.
_UNUSED_PARTS = {"input_scale", "input_zero_point"}
_KV_SCALE = re.compile(
    r".*layers\.(?P<layer>\d{1,6})\.self_attn\.(?:attn\.)?(?P<side>[kv])(?:_scale|_proj\.[kv]_scale|_proj\.output_scale)"
)
_UNUSED = re.compile(r".+\.self_attn\.(?:attn\.)?(?:q|prob)_scale")
_MAX_EXPERTS = 1 << 16
_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>gate_up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class _ExpertRows:
    """Some rows of one expert's matrix in a tensor [experts, rows, columns]."""

    tensor: str
    expert: int
    rows: range


class StoredWeights:
    """The weights of a folder's tensor files."""

    def __init__(self, files: TensorFiles, quantization: Quantization) -> None:
        self.label = files.label
        self._files = files
        self._quantization = quantization
        self._kinds: dict[str, str] = {}  # of each module with a weight
        self._experts: dict[str, _ExpertRows] = {}
        self._others: set[str] = set()
        self._kv_scales: dict[tuple[int, str], str] = {}  # by layer and side ("k", "v")
        parts = []
        for name in files.names():
            module, _, part = name.rpartition(".")
            if part == "weight" or (part in _MAIN and self._explains(module, part)):
                self._add_main(module, part)
            elif not self._add_special(name):
                parts.append(name)
        self._others.update(name for name in parts if not self._is_part(name))

    def names(self) -> Iterable[str]:
        """All weights, and the tensors that belong to none."""
        return [*(f"{module}.weight" for module in self._kinds), *self._experts, *self._others]

    def read(self, name: str, shape: tuple[int, ...]) -> Rows:
        """A weight, checked to have this shape. Raises ModelError."""
        module, _, part = name.rpartition(".")
        kind = self._kinds.get(module, "plain") if part == "weight" else "plain"
        if name in self._experts:
            return self._read_expert(self._experts[name], name, shape)
        if kind == "plain":
            return self._files.read_checked(name, shape)
        if len(shape) != 2:
            raise ModelError(f"{self.label}: tensor {name!r} is quantized; a vector of f32, f16 or bf16 is expected")
        if self._quantization.method not in _METHODS[kind]:
            raise ModelError(f"{self.label}: tensor {name!r} is quantized ({kind}), which config.json does not explain")
        scheme, matrix = self._quantization.scheme(module), (shape[0], shape[1])
        if kind != "columns":
            readers: dict[str, Callable[[TensorFiles, str, Scheme, tuple[int, int]], Rows]] = {
                "packed": read_packed,
                "int8": read_plain,
                "fp8": read_fp8,
            }
            return readers[kind](self._files, module, scheme, matrix)
        if self._quantization.method == "awq":
            return read_awq(self._files, module, scheme, matrix)
        return read_gptq(self._files, module, scheme, self._quantization.zero_point_offset, matrix)

    def read_expert(self, name: str, shape: tuple[int, ...], expert: int) -> Rows:
        """One expert's part of a plain tensor of all experts."""
        entry = self._files.entry(name)
        if entry.shape != shape or entry.dtype not in FLOATS:
            raise ModelError(
                f"{self.label}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected {list(shape)}"
            )
        return self._files.read_rows(name, expert, range(shape[1]))

    def is_void(self, name: str) -> bool:
        """Whether a tensor says nothing: a bias of zeros, which AutoGPTQ gives every matrix that it packs."""
        module, _, part = name.rpartition(".")
        if part != "bias" or self._kinds.get(module) != "columns" or len(self._files.entry(name).shape) != 1:
            return False
        return not bool(self._files.read(name).any())

    def kv_scales(self, num_layers: int, num_kv_heads: int) -> KvScales | None:
        """The scales of 8-bit keys and values, if the checkpoint has them. Raises ModelError if not all of them can be used."""
        if not self._kv_scales or not self._quantization.has_kv_scales:
            return None
        found = {}
        for (layer, side), name in self._kv_scales.items():
            shape = self._files.entry(name).shape
            if math.prod(shape) not in (1, num_kv_heads):
                raise ModelError(
                    f"{self.label}: tensor {name!r} has shape {list(shape)}, expected 1 or {num_kv_heads} numbers"
                )
            if layer < num_layers:
                found[layer, side] = self._files.read_checked(name, shape)
        return kv_scales(found, num_layers, num_kv_heads, self.label)

    def _explains(self, module: str, part: str) -> bool:
        """Whether a packed tensor can be the module's weight: it's no weight beside one, unless config.json speaks of such tensors."""
        return self._quantization.method in _METHODS[_MAIN[part]] or f"{module}.weight" not in self._files

    def _add_main(self, module: str, part: str) -> None:
        kind = _MAIN.get(part)
        if kind is None:
            kind = _TYPES.get(self._files.entry(f"{module}.{part}").dtype, "plain")
        if module in self._kinds:
            raise ModelError(f"{self.label}: tensor {module + '.weight'!r} is there twice, once quantized")
        self._kinds[module] = kind

    def _add_special(self, name: str) -> bool:
        """Whether it's a KV scale, an unused one, or a fused tensor of all experts."""
        if match := _KV_SCALE.fullmatch(name):
            place = (int(match["layer"]), match["side"])
            if place in self._kv_scales:
                raise ModelError(
                    f"{self.label}: tensors {self._kv_scales[place]!r} and {name!r} are scales of the same values"
                )
            self._kv_scales[place] = name
            return True
        if match := _FUSED.fullmatch(name):
            return self._add_experts(name, match["experts"], match["part"])
        return _UNUSED.fullmatch(name) is not None

    def _add_experts(self, name: str, experts: str, part: str) -> bool:
        shape = self._files.entry(name).shape
        is_matrices = len(shape) == 3 and 0 < shape[0] <= _MAX_EXPERTS and 0 not in shape
        if not is_matrices or (part == "gate_up_proj" and shape[1] % 2):
            return False
        half = shape[1] // 2
        ranges = {"down_proj": range(shape[1])}
        if part == "gate_up_proj":
            ranges = {"gate_proj": range(half), "up_proj": range(half, shape[1])}
        for expert in range(shape[0]):
            for projection, rows in ranges.items():
                self._experts[f"{experts}.{expert}.{projection}.weight"] = _ExpertRows(name, expert, rows)
        return True

    def _is_part(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        kind = self._kinds.get(module)
        return kind is not None and (part in _PARTS[kind] or (kind != "plain" and part in _UNUSED_PARTS))

    def _read_expert(self, place: _ExpertRows, name: str, shape: tuple[int, ...]) -> Rows:
        entry = self._files.entry(place.tensor)
        found = [len(place.rows), entry.shape[2]]
        if found != list(shape):
            raise ModelError(
                f"{self.label}: tensor {place.tensor!r} gives {name!r} shape {found}, expected {list(shape)}"
            )
        if entry.dtype not in FLOATS:
            raise ModelError(f"{self.label}: tensor {place.tensor!r} has type {entry.dtype}, which is not supported")
        return self._files.read_rows(place.tensor, place.expert, place.rows)
