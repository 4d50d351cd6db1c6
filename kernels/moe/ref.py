"""A mixture of experts (Shazeer et al., 2017) in plain torch, expert by expert."""

import torch

from kernels.elementwise import each
from kernels.expert_weights import Experts
from kernels.int4_matmul.ref import matmul_float_activations
from kernels.moe.routing import Routing
from kernels.silu_mul.ref import silu_mul_ref


def route_ref(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [T, E] -> chosen experts int64 [T, top_k], ascending, and what their results count, float32.

    A row with a logit that is not finite chooses the first experts and counts them NaN.
    """
    is_sound = torch.isfinite(logits).all(dim=1, keepdim=True)
    sound = torch.where(is_sound, logits, torch.zeros_like(logits))
    scores = each(torch.sigmoid, sound) if routing.scoring == "sigmoid" else torch.softmax(sound, dim=1)
    choice = scores if routing.bias is None else scores + routing.bias
    if routing.num_groups > 1:
        grouped = choice.view(len(choice), routing.num_groups, -1)
        worth = grouped.sort(dim=2, descending=True).values[:, :, :2].sum(dim=2)
        kept = _first_of_highest(worth, routing.top_groups)
        is_kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, kept, value=True)
        choice = grouped.masked_fill(~is_kept.unsqueeze(2), float("-inf")).flatten(1)
    first = torch.arange(routing.top_k).expand(len(choice), -1)
    chosen = torch.where(is_sound, _first_of_highest(choice, routing.top_k), first).sort(dim=1).values
    weights = scores.gather(1, chosen)
    if routing.normalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return chosen, torch.where(is_sound, weights * routing.scale, torch.full_like(weights, float("nan")))


def _first_of_highest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the highest numbers of each row; of equal ones the first. `topk` would not say which."""
    return numbers.sort(dim=1, descending=True, stable=True).indices[:, :count]


def moe_ref(
    x: torch.Tensor, logits: torch.Tensor, experts: Experts, routing: Routing, added: torch.Tensor | None
) -> torch.Tensor:
    """x float32 [T, H] -> float32 [T, H]; a row's results are added in the order of their experts."""
    chosen, weights = route_ref(logits, routing)
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = matmul_float_activations(x[rows], experts.gate_up.matrix(expert)).chunk(2, dim=1)
        result = matmul_float_activations(silu_mul_ref(gate, up), experts.down.matrix(expert))
        out[rows] += weights[rows, places].unsqueeze(1) * result
    return out if added is None else out + added
