"""The matrices of a layer's experts, one behind the other, each packed as it would be alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from kernels.errors import KernelError
from kernels.huge_pages import WeightMemory
from kernels.weights import Int4Weight, Int8Weight, Weight


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of each expert, all of one shape and format."""

    first: Weight  # the first expert's, a view of `packed`
    packed: torch.Tensor  # [num_experts, ...]

    @classmethod
    def gather(
        cls, num_experts: int, matrices: Iterable[Weight], memory: WeightMemory | None = None
    ) -> "ExpertMatrices":
        """From the experts' matrices in their order, taken one at a time. Raises KernelError if they aren't alike or not as many."""
        packed: torch.Tensor | None = None
        first: Weight | None = None
        for expert, matrix in enumerate(in_one_format(num_experts, matrices)):
            if first is None or packed is None:
                packed = (memory or WeightMemory()).empty((num_experts, *matrix.packed.shape), matrix.packed.dtype)
                first = replace(matrix, packed=packed[0])
            packed[expert] = matrix.packed
        assert first is not None
        assert packed is not None
        return cls(first, packed)

    @property
    def num_experts(self) -> int:
        """How many."""
        return len(self.packed)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of each."""
        return self.first.shape

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.packed.nbytes

    def matrix(self, expert: int) -> Weight:
        """One expert's."""
        return replace(self.first, packed=self.packed[expert])


def in_one_format(num_experts: int, matrices: Iterable[Weight]) -> Iterator[Weight]:
    """The experts' matrices, none of which is held. Raises KernelError if they aren't alike or not as many, or have columns in another order."""
    first: Weight | None = None
    count = 0
    for matrix in matrices:
        if isinstance(matrix, Int4Weight | Int8Weight) and matrix.order is not None:
            raise KernelError("ExpertMatrices: columns in another order (act-order) are not supported in experts")
        first = first or replace(matrix, packed=matrix.packed.new_empty(0, *matrix.packed.shape[1:]))
        if count == num_experts or not _are_alike(first, matrix):
            raise KernelError(f"ExpertMatrices: expert {count} differs in format or number from the others")
        count += 1
        yield matrix
    if first is None or count != num_experts:
        raise KernelError(f"ExpertMatrices: {count} experts instead of {num_experts}")


def _are_alike(one: Weight, other: Weight) -> bool:
    """Whether everything is the same but the numbers, the first of which may be missing."""
    same_memory = one.packed.shape[1:] == other.packed.shape[1:] and one.packed.dtype == other.packed.dtype
    return type(one) is type(other) and same_memory and replace(other, packed=one.packed) == one


@dataclass(frozen=True, slots=True)
class Experts:
    """What a mixture's experts compute with: down(silu(gate x) * up x)."""

    gate_up: ExpertMatrices  # [2 * size, hidden] each, gate in the first half
    down: ExpertMatrices  # [hidden, size] each

    def __post_init__(self) -> None:
        (double, hidden), (out, size) = self.gate_up.shape, self.down.shape
        if (double, hidden) != (2 * size, out) or self.gate_up.num_experts != self.down.num_experts:
            raise KernelError(f"Experts: gate_up {[double, hidden]} and down {[out, size]} don't fit each other")

    @property
    def num_experts(self) -> int:
        """How many."""
        return self.down.num_experts

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.gate_up.nbytes + self.down.nbytes
