"""A GGUF file as a source: dequantized to bf16, by Hugging Face names, with a config.json and a tokenizer made of its metadata."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from protocol.model_card import TokenizerSpec
from worker.model.architectures import architecture, folder_config
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.errors import ModelError
from worker.model.gguf_header import GgufTensor, read_header
from worker.model.load import open_checkpoint
from worker.model.tensors import Rows, dequantized
from worker.quantize.errors import QuantizeError
from worker.quantize.shard_writer import TensorLayout
from worker.quantize.source import SourceTensor

_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip


class GgufSource:
    """See `Source`. One tensor's packed rows are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._path = path
        try:
            self._checkpoint = open_checkpoint(path)
        except ModelError as error:
            raise QuantizeError(str(error)) from None
        self.config = _folder_config(self._checkpoint)
        self._places = _places(self._checkpoint, read_header(path).tensors)
        self.tensors: Mapping[str, SourceTensor] = {
            name: SourceTensor(TensorLayout(torch.bfloat16, shape), path.name)
            for name, (_, shape) in self._places.items()
        }
        self._norm_offset = folder_config(self.config, self.label)[1].norm_offset - self._checkpoint.config.norm_offset
        self._last: tuple[str, Rows] | None = None

    def files(self) -> Mapping[str, Path]:
        """See `Source.files`."""
        return {self._path.name: self._path}

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """See `Source.rows`."""
        if self._last is None or self._last[0] != name:
            stored, shape = self._places[name]
            try:
                self._last = (name, self._checkpoint.source.read(stored, shape))
            except ModelError as error:
                raise QuantizeError(str(error)) from None
        rows = self._last[1]
        if isinstance(rows, torch.Tensor):
            values = rows[first:last].float()
            return (values - self._norm_offset if "norm" in name else values).to(torch.bfloat16)
        return dequantized(rows, first, last).to(torch.bfloat16)

    def tokenizer(self) -> TokenizerSpec:
        """See `Source.tokenizer`."""
        return self._checkpoint.tokenizer

    def write_companions(self, folder: Path) -> list[str]:
        """See `Source.write_companions`: the tokenizer."""
        files = tokenizer_files(self._checkpoint.tokenizer)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        return list(files)


def _places(checkpoint: Checkpoint, present: Mapping[str, GgufTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By its name in a folder: each tensor's name and shape in the file."""
    config = checkpoint.config
    if checkpoint.rope_factors_name in present:
        raise QuantizeError(
            f"{checkpoint.label}: holds rope factors, which have no place in a folder; start from the original"
        )
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    taken: set[str] = set()
    for role, name in architecture(config.architecture, checkpoint.label).names.items():
        for layer in range(config.num_layers) if "{layer}" in name else (None,):
            stored = _stored_name(checkpoint, role, layer)
            if stored is not None and stored in present and stored not in taken:
                taken.add(stored)
                found[name.format(layer=layer)] = (stored, present[stored].shape)
    unknown = sorted(present.keys() - taken)
    if unknown:
        raise QuantizeError(
            f"{checkpoint.label}: tensor {unknown[0]!r} has no place in a folder of {config.architecture}"
        )
    return found


def _stored_name(checkpoint: Checkpoint, role: str, layer: int | None) -> str | None:
    """What the file calls a tensor; None for a role that its format doesn't have."""
    try:
        return checkpoint.tensor_name(role, layer)
    except KeyError:
        return None


def _folder_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json, as transformers writes it for such a model; read back, it's the same model. Raises QuantizeError."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if config.architecture not in _CLASSES:
        raise QuantizeError(
            f"{checkpoint.label}: {config.architecture} can't be quantized from GGUF; start from a folder"
        )
    fields = {
        "architectures": [_CLASSES[config.architecture]], "model_type": config.architecture, "dtype": "bfloat16",
        **_numbers(config), **_particulars(config),
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": list(tokenizer.eos_token_ids),
    }  # fmt: skip
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
    try:
        _, read = folder_config(fields, checkpoint.label)
    except ModelError as error:
        raise QuantizeError(f"{checkpoint.label}: can't be written as config.json: {error}") from None
    # Norms are stored with their offset in a GGUF file, and without it in a folder.
    if replace(read, norm_offset=config.norm_offset) != config:
        raise QuantizeError(f"{checkpoint.label}: has settings that config.json doesn't hold; start from a folder")
    return fields


def _numbers(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size, "intermediate_size": config.ffn_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.context_length, "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip


def _particulars(config: ModelConfig) -> dict[str, Any]:
    """What only some architectures have."""
    if config.architecture != "gemma3_text":
        return {
            "hidden_act": "silu",
            "attention_bias": False,
            **({"mlp_bias": False} if config.architecture == "llama" else {}),
        }
    windows = [window for window in config.windows if window is not None]
    return {
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "rope_local_base_freq": config.local_rope_theta,
        "query_pre_attn_scalar": round((config.softmax_scale or config.head_dim**-0.5) ** -2),
        "sliding_window": windows[0] if windows else None,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
    }  # fmt: skip


def tokenizer_files(spec: TokenizerSpec) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json that are read back as this tokenizer."""
    document = json.loads(spec.tokenizer_json)
    text = {token for token, _ in spec.text_tokens}
    added = sorted({*spec.control_tokens, *spec.text_tokens}, key=lambda item: item[1])
    document["model"]["vocab"] |= dict(added)
    document["added_tokens"] = [
        {"id": index, "content": token, "special": token not in text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for token, index in added
    ]  # fmt: skip
    names = {index: token for token, index in added} | {
        index: token for token, index in document["model"]["vocab"].items()
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": spec.add_bos}
    if spec.bos_token_id is not None:
        settings["bos_token"] = names[spec.bos_token_id]
        if spec.add_bos:
            document["post_processor"] = _with_first(settings["bos_token"], spec.bos_token_id)
    if spec.eos_token_ids:
        settings["eos_token"] = names[spec.eos_token_ids[0]]
    if spec.chat_template is not None:
        settings["chat_template"] = spec.chat_template
    return {"tokenizer.json": document, "tokenizer_config.json": settings}


def _with_first(token: str, index: int) -> dict[str, Any]:
    """Post-processing that puts a token before a text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
