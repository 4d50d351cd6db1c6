"""The native mixture of experts. See `native/moe.hpp`."""

import torch

from kernels.dense_matmul import NATIVE_TYPES
from kernels.expert_weights import ExpertMatrices, Experts
from kernels.moe.routing import Routing
from kernels.weights import DenseWeight, Fp8Weight

_E4M3 = 3  # beside NATIVE_TYPES

ExpertsTuple = tuple[int, int, int, int, int, int, int, bool, int]


def moe_native(
    x: torch.Tensor, logits: torch.Tensor, experts: Experts, routing: Routing, added: torch.Tensor | None, out: torch.Tensor
) -> None:  # fmt: skip
    """Into `out`; arguments have been checked."""
    from kernels import _native

    bias = 0 if routing.bias is None else routing.bias.data_ptr()
    choice = (
        bias, routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups, routing.scoring == "sigmoid",
        routing.normalize, routing.scale,
    )  # fmt: skip
    _native.moe(
        x.data_ptr(), logits.data_ptr(), 0 if added is None else added.data_ptr(), out.data_ptr(), len(x), choice,
        _described(experts.gate_up), _described(experts.down),
    )  # fmt: skip


def _described(matrices: ExpertMatrices) -> ExpertsTuple:
    one, packed = matrices.first, matrices.packed
    place = (packed.data_ptr(), packed[0].nbytes, *one.shape)
    if isinstance(one, Fp8Weight):
        return (*place, 0, 0, 0, False, _E4M3)
    if isinstance(one, DenseWeight):
        return (*place, 0, 0, 0, False, NATIVE_TYPES[packed.dtype])
    return (*place, one.group_size, one.bits, one.scale_dtype.itemsize, one.has_minimum, 0)
