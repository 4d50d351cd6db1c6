"""How rows choose experts."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels.errors import KernelError


@dataclass(frozen=True, slots=True)
class Routing:
    """A row goes to the `top_k` experts of the highest scores; of equal ones the lower number is chosen.

    Scores are a softmax over the logits or their sigmoids. `bias` is added to them for the choice alone (Wang et al., 2024). With groups,
    the choice is limited to the `top_groups` whose two best experts add up to most (DeepSeek-V3, 2024). An expert's result counts its
    score, divided by the sum of the chosen ones' if `normalize`, times `scale`.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: torch.Tensor | None = None  # float32 [num_experts]
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise KernelError for numbers that leave no choice."""
        if self.scoring not in ("softmax", "sigmoid"):
            raise KernelError(f"moe: scoring must be softmax or sigmoid, got {self.scoring!r}")
        if self.num_experts < 1 or self.num_groups < 1 or self.num_experts % self.num_groups:
            raise KernelError(f"moe: {self.num_experts} experts can't be cut into {self.num_groups} groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise KernelError(f"moe: top_groups must be in [1, {self.num_groups}], got {self.top_groups}")
        choices = self.num_experts // self.num_groups * self.top_groups
        if not 1 <= self.top_k <= choices:
            raise KernelError(f"moe: top_k must be in [1, {choices}], got {self.top_k}")
        bias = self.bias
        if bias is not None and (bias.dtype is not torch.float32 or tuple(bias.shape) != (self.num_experts,)):
            raise KernelError(f"moe: bias must be float32 [{self.num_experts}], got {bias.dtype} {list(bias.shape)}")
        if bias is not None and bias.is_cpu and not (bias.is_contiguous() and bool(torch.isfinite(bias).all())):
            raise KernelError("moe: bias must be contiguous and finite")

    def to(self, device: torch.device) -> "Routing":
        """The same, with its bias on a device."""
        return self if self.bias is None else replace(self, bias=self.bias.to(device))
