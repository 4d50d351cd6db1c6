"""The memory that a forward pass computes in: made once, used by every layer."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Buffer:
    """What a part of a model needs for each row. Parts that ask for equal buffers share one, so nothing outlives a part's call in them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Workspace:
    """Memory of all parts for a number of rows: `work[buffer]` is [num_rows, *buffer.shape]."""

    def __init__(self, memory: dict[Buffer, torch.Tensor], num_rows: int) -> None:
        self._memory = memory
        self.num_rows = num_rows

    @classmethod
    def allocate(cls, buffers: Iterable[Buffer], num_rows: int, device: torch.device) -> "Workspace":
        """Memory for as many rows."""
        memory = {buffer: torch.empty(num_rows, *buffer.shape, dtype=buffer.dtype, device=device) for buffer in buffers}
        return cls(memory, num_rows)

    def __getitem__(self, buffer: Buffer) -> torch.Tensor:
        return self._memory[buffer]

    def first(self, num_rows: int) -> "Workspace":
        """The same memory for fewer rows."""
        return Workspace({buffer: tensor[:num_rows] for buffer, tensor in self._memory.items()}, num_rows)
