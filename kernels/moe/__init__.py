"""A mixture of experts: routing and the products of each row with its experts, in one op."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output, sizes
from kernels.errors import KernelError
from kernels.expert_weights import Experts
from kernels.moe.gpu_experts import GpuExpertMatrices, GpuExperts
from kernels.moe.ref import moe_ref
from kernels.moe.routing import Routing

__all__ = ["GpuExpertMatrices", "GpuExperts", "Routing", "moe"]


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    experts: Experts | GpuExperts,
    routing: Routing,
    *,
    added: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """x float32 [T, H], router_logits float32 [T, num_experts] -> the weighted sum of each row's experts, float32 [T, H], plus `added` [T, H].

    Rows are grouped by expert: the cost is that of the experts that are used, each of which is read once (for every 256 rows). A row's
    results are added in the order of their experts' numbers, so that its bits don't depend on other rows. A row whose logits are not all
    finite gives NaN.
    """
    rows, hidden = sizes("moe", "x", x, 2)
    check_tensor("moe", "x", x, torch.float32, (None, experts.down.shape[0]), backend)
    check_tensor("moe", "router_logits", router_logits, torch.float32, (rows, routing.num_experts), backend)
    if routing.num_experts != experts.num_experts:
        raise KernelError(f"moe: routing is for {routing.num_experts} experts, there are {experts.num_experts}")
    if added is not None:
        check_tensor("moe", "added", added, torch.float32, (rows, hidden), backend)
    if isinstance(experts, GpuExperts) is not (backend is Backend.GPU):
        raise KernelError(f"moe: experts are not laid out for {backend}")
    if routing.bias is not None and routing.bias.device.type != x.device.type:
        raise KernelError(f"moe: bias must be where x is, on {x.device}")
    result = output("moe", out, (rows, hidden), backend)
    if isinstance(experts, GpuExperts):
        if result.numel():
            from kernels.moe.gpu import moe_gpu

            moe_gpu(x, router_logits, experts, routing, added, result)
        return result
    if backend is Backend.REF:
        return result.copy_(moe_ref(x, router_logits, experts, routing, added))
    from kernels.moe.native import moe_native

    moe_native(x, router_logits, experts, routing, added, result)
    return result
