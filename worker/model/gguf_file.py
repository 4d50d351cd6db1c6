"""A GGUF file as a checkpoint."""

from collections.abc import Iterable
from pathlib import Path

import gguf
import torch

from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.digest import single_digest
from worker.model.errors import ModelError
from worker.model.gguf_config import gguf_config, tensor_name
from worker.model.gguf_header import GgufHeader, read_header
from worker.model.gguf_quants import supports, unpack
from worker.model.gguf_tokenizer import tokenizer_from_metadata
from worker.model.opened_file import OpenedFile
from worker.model.tensors import Rows, permuted

_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """Tensors of a GGUF file."""

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        self.label = str(header.path)
        self._tensors = header.tensors
        self._config = config
        self._file = OpenedFile(header.path)

    def names(self) -> Iterable[str]:
        """All tensors in the file."""
        return self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> Rows:
        """A tensor as stored; rows of a llama's Q and K are put back from interleaved to half-and-half rotary pairs."""
        rows = self._part(name, shape, shape, 0)
        if self._config.architecture == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
            rows = permuted(rows, _half_order(shape[0], self._config.head_dim))
        return rows

    def read_expert(self, name: str, shape: tuple[int, ...], expert: int) -> Rows:
        """One expert's part of a tensor [num_experts, ...]."""
        return self._part(name, shape, shape[1:], expert)

    def _part(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...], index: int) -> Rows:
        """Part number `index` of a tensor of this shape, itself of the shape wanted."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.label}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise ModelError(f"{self.label}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        num_bytes = tensor.num_bytes if wanted == shape else tensor.num_bytes // shape[0]
        start = tensor.start + index * num_bytes
        raw = self._file.read(start, num_bytes)
        if tensor.type in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[tensor.type]).view(wanted)
        if supports(tensor.type) and len(wanted) == 2:
            return unpack(raw, tensor.type, wanted[0])
        raise ModelError(f"{self.label}: tensor {name!r} has type {tensor.type.name}, which is not supported")

    def is_void(self, name: str) -> bool:
        """None is, whatever its name."""
        return name not in self._tensors


def _half_order(num_rows: int, head_dim: int) -> torch.Tensor:
    """Where to find each row: pair (2i, 2i + 1) of the file is (i, i + head_dim / 2) here."""
    order = torch.arange(num_rows).view(-1, head_dim // 2, 2)
    return order.permute(0, 2, 1).reshape(-1)


def open_gguf(path: Path) -> Checkpoint:
    """Read header and tokenizer; tensors are read when they're asked for. Raises ModelError."""
    header = read_header(path)
    config = gguf_config(header)
    return Checkpoint(
        config=config,
        tokenizer=tokenizer_from_metadata(header.metadata, config.vocab_size, str(path)),
        source=GgufSource(header, config),
        tensor_name=tensor_name,
        digest=single_digest(path),
        label=str(path),
        rope_factors_name=_ROPE_FACTORS,
        stacks_experts=True,
    )
