"""What the loader asks of a checkpoint, whatever its format: each tensor by its role, exactly once, and nothing left over."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.huge_pages import WeightMemory
from protocol.model_card import TokenizerSpec
from worker.kv_scales import KvScales
from worker.model.config import ModelConfig
from worker.model.digest import FileDigest
from worker.model.errors import ModelError
from worker.model.heap import release_free_memory
from worker.model.tensors import Rows, is_finite, nbytes

_RELEASE_BYTES = 16 << 20


class TensorSource(Protocol):
    """A file format's part: tensors by the names that the format gives them."""

    label: str

    def names(self) -> Iterable[str]:
        """All tensors in the checkpoint."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> Rows:
        """One tensor, checked to have this shape; raises ModelError."""
        ...

    def is_void(self, name: str) -> bool:
        """Whether a tensor that nobody asked for says nothing."""
        ...

    def read_expert(self, name: str, shape: tuple[int, ...], expert: int) -> Rows:
        """One expert's part of a tensor of all experts, checked to have this shape [num_experts, ...]; raises ModelError."""
        ...


class TensorName(Protocol):
    """What a format calls a tensor."""

    def __call__(self, role: str, layer: int | None, expert: int | None = None) -> str:
        """The name of the tensor in this role, of the model or of a layer or of one of a layer's experts."""
        ...


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint. `tensor_name` gives the format's name for (role, layer, expert); names in `ignored` and those that begin
    as one of `ignored_prefixes` hold nothing that is needed; `kv_scales` reads the scales that come along."""

    config: ModelConfig
    tokenizer: TokenizerSpec
    source: TensorSource
    tensor_name: TensorName
    digest: FileDigest
    label: str
    rope_factors_name: str | None = None
    stacks_experts: bool = False  # one tensor holds a matrix of all experts
    ignored: frozenset[str] = frozenset()
    ignored_prefixes: tuple[str, ...] = ()
    kv_scales: Callable[[], KvScales | None] = lambda: None
    memory: WeightMemory = field(default_factory=WeightMemory)  # where packed matrices go
    _taken: set[str] = field(default_factory=set)
    _bytes_since_release: int = 0

    def matrix(self, role: str, layer: int | None, shape: tuple[int, int], expert: int | None = None) -> Rows:
        """A matrix, as it's stored."""
        name = self.tensor_name(role, layer, expert)
        if expert is None or not self.stacks_experts:
            return self._take(name, shape)
        assert self.config.experts is not None
        rows = self.source.read_expert(name, (self.config.experts.num_experts, *shape), expert)
        self._note(name if expert == 0 else f"{name}[{expert}]", name, rows)
        return rows

    def vector(self, role: str, layer: int | None, size: int) -> torch.Tensor:
        """An unquantized vector, float32."""
        return self._vector(self.tensor_name(role, layer), size)

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies [head_dim / 2], if the checkpoint stores them."""
        if self.rope_factors_name is None or self.rope_factors_name not in set(self.source.names()):
            return None
        factors = self._vector(self.rope_factors_name, (self.config.rotary_dim or self.config.head_dim) // 2)
        if not bool((factors > 0).all()):
            raise ModelError(f"{self.label}: tensor {self.rope_factors_name!r} has values that are not positive")
        return factors

    def finish(self) -> None:
        """Raise ModelError if the checkpoint holds a tensor that nobody asked for."""
        left = sorted(set(self.source.names()) - self._taken - self.ignored)
        left = [name for name in left if not name.startswith(self.ignored_prefixes)]
        unknown = [name for name in left if not self.source.is_void(name)]
        if unknown:
            raise ModelError(f"{self.label}: unknown tensor {unknown[0]!r} ({len(unknown)} in all)")

    def _vector(self, name: str, size: int) -> torch.Tensor:
        values = self._take(name, (size,))
        if not isinstance(values, torch.Tensor):
            raise ModelError(f"{self.label}: tensor {name!r} is quantized; a vector of f32, f16 or bf16 is expected")
        return values.float()

    def _take(self, name: str, shape: tuple[int, ...]) -> Rows:
        rows = self.source.read(name, shape)
        self._note(name, name, rows)
        return rows

    def _note(self, part: str, name: str, rows: Rows) -> None:
        """Count what was taken, of the tensor of this name."""
        if part in self._taken:
            raise ModelError(f"{self.label}: tensor {name!r} is used twice")
        if not is_finite(rows):
            raise ModelError(f"{self.label}: tensor {name!r} has values that are not finite")
        self._taken.add(part)
        self._release(nbytes(rows))

    def _release(self, num_bytes: int) -> None:
        """Now and then give back what earlier tensors were read into: together it would be as much as the weights of a small model."""
        self._bytes_since_release += num_bytes
        if self._bytes_since_release >= _RELEASE_BYTES:
            release_free_memory()
            self._bytes_since_release = 0
