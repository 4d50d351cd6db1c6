"""Which matrices are quantized, and to how many bits: rules by the family of the model, and patterns of one's own.

A module is a tensor's name without `.weight`. Only matrices of linear layers are quantized; embeddings, norms, routers, everything that isn't
part of the language model, and what isn't two-dimensional stays as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from worker.quantize.errors import QuantizeError
from worker.quantize.rounding import Precision
from worker.quantize.shard_writer import TensorLayout

AS_IT_IS = 16
GROUP_SIZES = (32, 64, 128)
_WEIGHT = ".weight"
# Always left alone unless a pattern of one's own says otherwise. kv_b_proj is absorbed into other products, an indexer only ranks tokens.
_KEPT = (
    "*vision*", "*visual*", "*mm_projector*", "*multi_modal_projector*", "*audio*", "*embed_tokens*", "*lm_head*", "*norm*", "*.mlp.gate",
    "*.shared_expert_gate", "*.router*", "*.kv_b_proj", "*.indexer.*", "*.eh_proj",
)  # fmt: skip
_EXPERT = "*.experts.[0-9]*.*"
_RULES: dict[str, tuple[tuple[str, int], ...]] = {
    "linear": (("*", 4),),
    "experts": ((_EXPERT, 4), ("*", 8)),
    "experts-only": ((_EXPERT, 4), ("*", AS_IT_IS)),
    "none": (("*", AS_IT_IS),),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """A base precision for what gets 4 bits, and the rules, the first that matches counts."""

    name: str
    four: Precision
    rules: tuple[tuple[str, int], ...]

    def precision(self, module: str, layout: TensorLayout) -> Precision | None:
        """How a module's matrix is quantized; None: it stays as it is."""
        if len(layout.shape) != 2 or 0 in layout.shape or not layout.dtype.is_floating_point:
            return None
        bits = next(bits for pattern, bits in self.rules if fnmatchcase(module, pattern))
        # Groups don't cross rows' ends: where the size that's wanted doesn't divide the row, a smaller one may.
        fitting = [size for size in GROUP_SIZES if layout.shape[1] % size == 0 and size <= self.four.group_size]
        if bits == AS_IT_IS or not fitting:
            return None
        if bits == 8:
            largest = max(size for size in GROUP_SIZES if layout.shape[1] % size == 0)
            return Precision(8, largest)
        return Precision(4, fitting[-1], self.four.is_symmetric)


def make_policy(name: str, four: Precision, overrides: Sequence[tuple[str, int]], config: Mapping[str, Any]) -> Policy:
    """A policy by its name, `auto` by the family: mixtures of experts have INT4 experts and 8 bits elsewhere, others INT4 linear layers."""
    for pattern, bits in overrides:
        if bits not in {4, 8, AS_IT_IS}:
            raise QuantizeError(f"pattern {pattern!r}: bits must be 4, 8 or {AS_IT_IS}, got {bits}")
    text = config.get("text_config")
    fields = text if isinstance(text, dict) else config
    num_experts = next(
        (fields[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if fields.get(key)), 0
    )
    chosen = ("experts" if num_experts else "linear") if name == "auto" else name
    kept = tuple((pattern, AS_IT_IS) for pattern in _KEPT)
    return Policy(chosen, four, (*overrides, *kept, *_RULES[chosen]))


def module_of(tensor: str) -> str | None:
    """The module that a tensor is the weight of."""
    return tensor.removesuffix(_WEIGHT) if tensor.endswith(_WEIGHT) else None


def quantization_config(chosen: Mapping[str, Precision], others: Iterable[str]) -> dict[str, Any]:
    """The entry of config.json, for modules that are quantized and linear modules that are not."""
    by_precision: dict[Precision, list[str]] = {}
    for module, precision in chosen.items():
        by_precision.setdefault(precision, []).append(module)
    groups = {
        f"group_{number}": {
            "targets": _targets(modules, [other for other in chosen if chosen[other] != precision] + list(others)),
            "weights": {
                "num_bits": precision.bits, "type": "int", "symmetric": precision.is_symmetric, "strategy": "group",
                "group_size": precision.group_size, "dynamic": False, "actorder": None, "observer": "mse",
            },
            "input_activations": None,
            "output_activations": None,
        }
        for number, (precision, modules) in enumerate(sorted(by_precision.items(), key=lambda item: str(item[0])))
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _targets(list(others), list(chosen)),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def kind_of(module: str) -> str:
    """The module's name with any number in place of its layer and expert, as a regular expression."""
    return re.sub(r"(?<=\\.)\d+(?=\\.)", r"\\d+", re.escape(module))


def _targets(modules: Sequence[str], others: Sequence[str]) -> list[str]:
    """Names and expressions that match these modules and none of the others."""
    taken = {kind_of(other) for other in others}
    targets = {module if kind_of(module) in taken else _expression(module) for module in modules}
    return sorted(targets)


def _expression(module: str) -> str:
    kind = kind_of(module)
    return f"re:^{kind}$" if kind != re.escape(module) else module
