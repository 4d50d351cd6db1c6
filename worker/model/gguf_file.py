"""A GGUF file of the llama family as a checkpoint."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig, RopeScaling
from worker.model.errors import ModelError
from worker.model.gguf_header import GgufHeader, read_header
from worker.model.gguf_quants import supports, unpack
from worker.model.gguf_tokenizer import tokenizer_from_metadata
from worker.model.tensors import Rows, permuted

_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_LAYER_NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
_NAMES = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """Tensors of a GGUF file, memory-mapped."""

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        self.label = str(header.path)
        self._tensors = header.tensors
        self._config = config
        self._data = np.memmap(header.path, dtype=np.uint8, mode="r")

    def names(self) -> Iterable[str]:
        """All tensors in the file."""
        return self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> Rows:
        """A tensor as stored; rows of Q and K are put back from interleaved to half-and-half rotary pairs."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.label}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise ModelError(f"{self.label}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        raw = self._data[tensor.start : tensor.start + tensor.num_bytes]
        rows: Rows
        if tensor.type in _PLAIN:
            rows = torch.from_numpy(np.array(raw)).view(_PLAIN[tensor.type]).view(shape)
        elif supports(tensor.type) and len(shape) == 2:
            rows = unpack(raw, tensor.type, shape[0])
        else:
            raise ModelError(f"{self.label}: tensor {name!r} has type {tensor.type.name}, which is not supported")
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            rows = permuted(rows, _half_order(shape[0], self._config.head_dim))
        return rows


def _half_order(num_rows: int, head_dim: int) -> torch.Tensor:
    """Where to find each row: pair (2i, 2i + 1) of the file is (i, i + head_dim / 2) here."""
    order = torch.arange(num_rows).view(-1, head_dim // 2, 2)
    return order.permute(0, 2, 1).reshape(-1)


def open_gguf(path: Path) -> Checkpoint:
    """Read header and tokenizer; tensors are read when they're asked for. Raises ModelError."""
    header = read_header(path)
    config = _config(header)
    return Checkpoint(
        config=config,
        tokenizer=tokenizer_from_metadata(header.metadata, config.vocab_size, str(path)),
        source=GgufSource(header, config),
        tensor_name=_tensor_name,
        digest=_digest(path),
        label=str(path),
        rope_factors_name=_ROPE_FACTORS,
    )


def _tensor_name(role: str, layer: int | None, expert: int | None = None) -> str:
    return _NAMES[role] if layer is None else f"blk.{layer}.{_LAYER_NAMES[role]}.weight"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Fields:
    """Typed look-ups of metadata."""

    def __init__(self, header: GgufHeader) -> None:
        self._metadata = header.metadata
        self.label = str(header.path)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.label}: metadata {key!r} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.label}: metadata {key!r} must be {kind.__name__}, got {type(value).__name__}")
        return value


def _config(header: GgufHeader) -> ModelConfig:
    fields = _Fields(header)
    architecture = fields.get("general.architecture", str)
    if architecture != "llama":
        raise ModelError(f"{fields.label}: architecture {architecture!r} is not supported (llama is)")
    num_heads = fields.get("llama.attention.head_count", int)
    hidden_size = fields.get("llama.embedding_length", int)
    if num_heads < 1:
        raise ModelError(f"{fields.label}: num_heads {num_heads} is out of range")
    head_dim = fields.get("llama.attention.key_length", int, hidden_size // num_heads)
    rotary_dim = fields.get("llama.rope.dimension_count", int, head_dim)
    if rotary_dim != head_dim:
        raise ModelError(f"{fields.label}: rotary embedding of {rotary_dim} of {head_dim} dimensions is not supported")
    if fields.get("llama.expert_count", int, 0):
        raise ModelError(f"{fields.label}: mixtures of experts are not supported")
    tokens = fields.get("tokenizer.ggml.tokens", list)
    config = ModelConfig(
        architecture=architecture,
        num_layers=fields.get("llama.block_count", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        ffn_size=fields.get("llama.feed_forward_length", int),
        vocab_size=len(tokens),
        context_length=fields.get("llama.context_length", int),
        rms_eps=fields.get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=fields.get("llama.rope.freq_base", float, 10000.0),
        rope_scaling=_rope_scaling(fields),
        tie_embeddings=_NAMES["head"] not in header.tensors,
    )
    config.check(fields.label)
    return config


def _rope_scaling(fields: _Fields) -> RopeScaling | None:
    kind = fields.get("llama.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"{fields.label}: rope scaling {kind!r} is not supported (none and linear are)")
    factor = fields.get("llama.rope.scaling.factor", float, 1.0)
    if not 1.0 <= factor <= 1e4:
        raise ModelError(f"{fields.label}: rope scaling factor {factor} is out of range")
    return RopeScaling("linear", factor)
