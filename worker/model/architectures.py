"""The architectures that this build runs, by the name that a checkpoint gives its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.backend import Backend
from worker.model import deepseek, gemma3, glm4_moe, glm_dsa, llama, qwen2, qwen3, qwen3_moe
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.errors import ModelError
from worker.model.hf_fields import Fields
from worker.model.model import Model


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model file's parts. `names` gives the name of each role's tensor in a folder, with {layer} and {expert} to fill in.

    `ignored` gives beginnings of names whose tensors hold nothing that is needed.
    """

    read_config: Callable[[Fields], ModelConfig]
    names: Mapping[str, str]
    build: Callable[[Checkpoint, Backend], Model]
    ignored: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()

    def tensor_name(self, role: str, layer: int | None, expert: int | None = None) -> str:
        """What a folder calls a tensor."""
        return self.names[role].format(layer=layer, expert=expert)


_ARCHITECTURES = {
    "deepseek_v3": Architecture(deepseek.read_config, deepseek.NAMES, deepseek.build, deepseek.ignored),
    "gemma3": Architecture(gemma3.read_whole_config, gemma3.WHOLE_NAMES, gemma3.build, gemma3.whole_ignored),
    "gemma3_text": Architecture(gemma3.read_config, gemma3.NAMES, gemma3.build),
    "glm4_moe": Architecture(glm4_moe.read_config, glm4_moe.NAMES, glm4_moe.build, glm4_moe.ignored),
    "glm_moe_dsa": Architecture(glm_dsa.read_config, glm_dsa.NAMES, glm_dsa.build, glm_dsa.ignored),
    "kimi_k2": Architecture(deepseek.read_config, deepseek.NAMES, deepseek.build, deepseek.ignored),
    "kimi_k25": Architecture(deepseek.read_kimi_config, deepseek.KIMI_NAMES, deepseek.build, deepseek.kimi_ignored),
    "llama": Architecture(llama.read_config, llama.NAMES, llama.build),
    "qwen2": Architecture(qwen2.read_config, qwen2.NAMES, llama.build),
    "qwen3": Architecture(qwen3.read_config, qwen3.NAMES, llama.build),
    "qwen3_moe": Architecture(qwen3_moe.read_config, qwen3_moe.NAMES, qwen3_moe.build),
}


def architecture(name: str, label: str) -> Architecture:
    """The architecture of this name; raises ModelError, naming the file by `label`, for one that isn't supported."""
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelError(f"{label}: model_type {name[:100]!r} is not supported (supported: {known})")
    return _ARCHITECTURES[name]


def folder_config(raw: dict[str, Any], label: str) -> tuple[Architecture, ModelConfig]:
    """What a config.json describes; `label` names the file. Raises ModelError."""
    fields = Fields(raw, label)
    found = architecture(fields.get("model_type", str), label)
    config = found.read_config(fields)
    config.check(label)
    return found, config
