"""One layer at a time in float32, in plain torch: what calibration needs of a dense model, with a look at what each matrix is given and gives.

Not the engine's forward pass: there, all layers are in memory, quantized. Here a layer's weights come and go, and only the activations stay. Torch can
take derivatives of it. What an architecture has (biases, norms of heads, windows, ...) is told by its `ModelConfig` and by which tensors there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from worker.model.config import ModelConfig
from worker.model.rope import angle_table, local_angle_table
from worker.quantize.errors import QuantizeError

Weights = Mapping[str, torch.Tensor]
# Matrices that have their input in common.
INPUTS: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
ROLES = tuple(role for roles in INPUTS for role in roles)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text")


class Observer:
    """Is told of each matrix of a layer what it's given and what it gives. This one doesn't care."""

    def given(self, roles: tuple[str, ...], x: torch.Tensor) -> None:
        """The input [num_tokens, in] of these matrices."""

    def made(self, role: str, y: torch.Tensor) -> None:
        """The output [num_tokens, out] of this matrix."""


@dataclass(frozen=True, slots=True)
class FloatLayers:
    """The arithmetic of a dense decoder's layers; `names` gives the tensor of a role with {layer} to fill in."""

    config: ModelConfig
    names: Mapping[str, str]
    angles: torch.Tensor  # [num_tokens, 2, rotated dimensions / 2], cosines and sines
    local_angles: torch.Tensor  # of layers with a window

    @classmethod
    def make(cls, config: ModelConfig, names: Mapping[str, str], num_tokens: int) -> "FloatLayers":
        """For windows of as many tokens."""
        short = replace(config, context_length=num_tokens)
        angles, local = angle_table(short), local_angle_table(short)
        return cls(config, names, angles, angles if local is None else local)

    def check(self, found: Mapping[str, tuple[int, ...]], label: str) -> None:
        """Raise QuantizeError unless all tensors are there, by name, and have the shapes that the configuration gives them. `label` names the source."""
        for role, shape in _shapes(self.config).items():
            name = self.names.get(role, "")
            for layer in range(self.config.num_layers if "{layer}" in name else 1 if name else 0):
                tensor = name.format(layer=layer)
                if tensor not in found and not role.endswith("_bias"):
                    raise QuantizeError(f"{label}: tensor {tensor!r} is missing")
                if found.get(tensor, shape) != shape:
                    raise QuantizeError(
                        f"{label}: tensor {tensor!r} has shape {list(found[tensor])}, expected {list(shape)}"
                    )

    def __call__(
        self, hidden: torch.Tensor, layer: int, weights: Weights, observer: Observer | None = None
    ) -> torch.Tensor:
        """From hidden float32 [num_tokens, hidden] of one text to the next layer's. `weights` float32 by role."""
        apply = _Products(weights, observer or Observer())
        attended = self._attend(layer, weights, *apply(INPUTS[0], self._norm(hidden, weights["attn_norm"])))
        (added,) = apply(INPUTS[1], attended)
        hidden = hidden + self._after(added, weights, "post_attn_norm")
        gate, up = apply(INPUTS[2], self._norm(hidden, weights["ffn_norm"]))
        is_gelu = self.config.architecture.startswith("gemma")
        gate = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
        (added,) = apply(INPUTS[3], gate * up)
        return hidden + self._after(added, weights, "post_ffn_norm")

    def final(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What the head is given, float32 [num_tokens, hidden], from the last layer's output and the last norm's stored factors."""
        return self._norm(hidden, weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight + self.config.norm_offset, self.config.rms_eps)

    def _after(self, x: torch.Tensor, weights: Weights, role: str) -> torch.Tensor:
        return self._norm(x, weights[role]) if role in weights else x

    def _attend(self, layer: int, weights: Weights, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        config, num_tokens = self.config, len(q)
        window = config.windows[layer] if config.windows else None
        angles = self.angles if window is None else self.local_angles
        heads = [part.view(num_tokens, -1, config.head_dim).transpose(0, 1) for part in (q, k, v)]
        queries, keys = (
            _rotated(self._after(part, weights, role), angles)
            for part, role in ((heads[0], "q_norm"), (heads[1], "k_norm"))
        )
        places = torch.arange(num_tokens)
        back = places[:, None] - places[None, :]
        mask = (back >= 0) & (back < (window or num_tokens))
        attended = functional.scaled_dot_product_attention(
            queries[None], keys[None], heads[2][None], attn_mask=mask, scale=config.softmax_scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1).reshape(num_tokens, -1)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensor of each role, those that only some architectures have among them."""
    hidden, ffn = config.hidden_size, config.ffn_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries), "gate": (ffn, hidden), "up": (ffn, hidden),
        "down": (hidden, ffn),
    }  # fmt: skip
    norms = dict.fromkeys(("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm"), (hidden,))
    heads = dict.fromkeys(("q_norm", "k_norm"), (config.head_dim,))
    biases = {f"{role}_bias": shape[:1] for role, shape in matrices.items()}
    table = (config.vocab_size, hidden)
    outside = {"embedding": table, "final_norm": (hidden,)} | ({} if config.tie_embeddings else {"head": table})
    return {**outside, **matrices, **norms, **heads, **biases}


@dataclass(frozen=True, slots=True)
class _Products:
    """The products of some matrices with their common input, under somebody's eyes."""

    weights: Weights
    observer: Observer

    def __call__(self, roles: tuple[str, ...], x: torch.Tensor) -> list[torch.Tensor]:
        self.observer.given(roles, x)
        made = [functional.linear(x, self.weights[role], self.weights.get(f"{role}_bias")) for role in roles]
        for role, y in zip(roles, made, strict=True):
            self.observer.made(role, y)
        return made


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[heads, num_tokens, head_dim]; of the first dimensions, pairs half their number apart."""
    cos, sin = angles.unbind(1)
    low, high, rest = torch.split(x, [cos.shape[1], cos.shape[1], x.shape[-1] - 2 * cos.shape[1]], dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
