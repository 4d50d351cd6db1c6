"""Experts as they lie in a GPU's memory: each matrix as it would alone, one behind the other."""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.expert_weights import ExpertMatrices, Experts
from kernels.gpu_weights import GpuDenseWeight, GpuFp8Weight, GpuInt4Weight, GpuInt8Weight
from kernels.placement import place


@dataclass(frozen=True, slots=True)
class GpuExpertMatrices:
    """One matrix of each expert. `first` describes all but for their units."""

    first: GpuInt4Weight | GpuInt8Weight | GpuDenseWeight
    numbers: torch.Tensor  # codes or matrices, [num_experts, ...]
    scales: torch.Tensor | None  # [num_experts, ...]
    units: torch.Tensor  # float32 [num_experts]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of each."""
        return self.first.shape


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """What a mixture's experts compute with."""

    gate_up: GpuExpertMatrices
    down: GpuExpertMatrices

    @property
    def num_experts(self) -> int:
        """How many."""
        return len(self.down.units)


def place_experts(experts: Experts, backend: Backend) -> "Experts | GpuExperts":
    """The experts as this backend's kernels read them; for CPU and reference those given."""
    if backend is not Backend.GPU:
        return experts
    return GpuExperts(_placed(experts.gate_up, backend), _placed(experts.down, backend))


def _placed(matrices: ExpertMatrices, backend: Backend) -> GpuExpertMatrices:
    """One at a time into memory for all."""
    numbers: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    first: GpuInt4Weight | GpuInt8Weight | GpuDenseWeight | None = None
    units = []
    for expert in range(matrices.num_experts):
        weight = place(matrices.matrix(expert), backend)
        if isinstance(weight, GpuFp8Weight):
            raise KernelError("moe: experts of 8-bit floats are not supported on GPUs")
        assert isinstance(weight, GpuInt4Weight | GpuInt8Weight | GpuDenseWeight)
        own = weight.matrix if isinstance(weight, GpuDenseWeight) else weight.codes
        if numbers is None:
            first, numbers = weight, torch.empty(matrices.num_experts, *own.shape, dtype=own.dtype, device=own.device)
        numbers[expert] = own
        if not isinstance(weight, GpuDenseWeight):
            if scales is None:
                shape = (matrices.num_experts, *weight.scales.shape)
                scales = torch.empty(shape, dtype=weight.scales.dtype, device=own.device)
            scales[expert] = weight.scales
        units.append(weight.unit)
    assert first is not None
    assert numbers is not None
    return GpuExpertMatrices(first, numbers, scales, torch.tensor(units, dtype=torch.float32, device=numbers.device))
