"""Experts as they lie in a GPU's memory: each matrix as it would alone, one behind the other."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.expert_weights import in_one_format
from kernels.gpu_weights import GpuDenseWeight, GpuFp8Weight, GpuInt4Weight, GpuInt8Weight
from kernels.placement import place
from kernels.weights import Weight


@dataclass(frozen=True, slots=True)
class GpuExpertMatrices:
    """One matrix of each expert. `first` describes all but for their units."""

    first: GpuInt4Weight | GpuInt8Weight | GpuDenseWeight
    numbers: torch.Tensor  # codes or matrices, [num_experts, ...]
    scales: torch.Tensor | None  # [num_experts, ...]
    units: torch.Tensor  # float32 [num_experts]

    @classmethod
    def gather(cls, num_experts: int, matrices: Iterable[Weight]) -> "GpuExpertMatrices":
        """From the experts' matrices in their order, taken and placed one at a time. Raises KernelError as `ExpertMatrices.gather` does, and for 8-bit floats."""
        numbers: torch.Tensor | None = None
        scales: torch.Tensor | None = None
        first: GpuInt4Weight | GpuInt8Weight | GpuDenseWeight | None = None
        units = []
        for expert, matrix in enumerate(in_one_format(num_experts, matrices)):
            weight = place(matrix, Backend.GPU)
            if isinstance(weight, GpuFp8Weight):
                raise KernelError("moe: experts of 8-bit floats are not supported on GPUs")
            assert isinstance(weight, GpuInt4Weight | GpuInt8Weight | GpuDenseWeight)
            own = weight.matrix if isinstance(weight, GpuDenseWeight) else weight.codes
            if numbers is None:
                first, numbers = weight, own.new_empty(num_experts, *own.shape)
            numbers[expert] = own
            if not isinstance(weight, GpuDenseWeight):
                if scales is None:
                    scales = weight.scales.new_empty(num_experts, *weight.scales.shape)
                scales[expert] = weight.scales
            units.append(weight.unit)
        assert first is not None
        assert numbers is not None
        return cls(first, numbers, scales, torch.tensor(units, dtype=torch.float32, device=numbers.device))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of each."""
        return self.first.shape


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """What a mixture's experts compute with."""

    gate_up: GpuExpertMatrices  # [2 * size, hidden] each, gate in the first half
    down: GpuExpertMatrices  # [hidden, size] each

    def __post_init__(self) -> None:
        (double, hidden), (out, size) = self.gate_up.shape, self.down.shape
        if (double, hidden) != (2 * size, out) or len(self.gate_up.units) != len(self.down.units):
            raise KernelError(f"GpuExperts: gate_up {[double, hidden]} and down {[out, size]} don't fit each other")

    @property
    def num_experts(self) -> int:
        """How many."""
        return len(self.down.units)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.gate_up.nbytes + self.down.nbytes
