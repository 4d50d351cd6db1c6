"""The sizes of a paged KV pool, explicit, never guessed from shapes."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.errors import KernelError

KvDtype = Literal["bf16", "fp16", "fp8"]
E4M3_MAX = 448.0
FP16_MAX = 65504.0
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 1024


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of a pool. `dtype` is that of stored elements: bfloat16, float16, or float8 e4m3 with a scale for each layer and head.

    `head_dim` is a key's size, `value_dim` a value's: None for as many elements, 0 for a pool without values. Only the layers in
    `value_layers`, ascending, have values; None stands for all.

    A latent pool is that of multi-head latent attention (DeepSeek-AI, 2024): its one "head" of keys holds a token's latent vector and its
    rotary part, and the values are the first elements of the keys. Where such a model has an indexer, the indexer's keys are kept as values.
    """

    num_layers: int
    num_pages: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: KvDtype
    value_dim: int | None = None
    value_layers: tuple[int, ...] | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise KernelError(f"KvLayout: dtype must be bf16, fp16 or fp8, got {self.dtype!r}")
        largest = MAX_LATENT_DIM if self.is_latent else MAX_HEAD_DIM
        if not 8 <= self.head_dim <= largest or self.head_dim % 8:
            raise KernelError(f"KvLayout: head_dim must be a multiple of 8 from 8 to {largest}, got {self.head_dim}")
        if not 0 <= self.v_dim <= MAX_HEAD_DIM or self.v_dim % 8:
            raise KernelError(
                f"KvLayout: value_dim must be a multiple of 8 from 0 to {MAX_HEAD_DIM}, got {self.value_dim}"
            )
        if min(self.num_layers, self.num_pages, self.num_kv_heads, self.page_size) < 1:
            raise KernelError("KvLayout: all sizes must be positive")
        if self.is_latent and self.num_kv_heads != 1:
            raise KernelError(f"KvLayout: a latent pool has one kv head, got {self.num_kv_heads}")
        layers = self.value_layers or ()
        if list(layers) != sorted(set(layers)) or not all(0 <= layer < self.num_layers for layer in layers):
            raise KernelError(f"KvLayout: value_layers must be ascending layers below {self.num_layers}, got {layers}")

    @property
    def v_dim(self) -> int:
        """Elements of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_value_layers(self) -> int:
        """Layers that have values."""
        if self.v_dim == 0:
            return 0
        return self.num_layers if self.value_layers is None else len(self.value_layers)

    def value_index(self, layer: int) -> int:
        """The place of a layer's values among those of all layers, -1 if it has none."""
        if self.v_dim == 0:
            return -1
        if self.value_layers is None:
            return layer
        return self.value_layers.index(layer) if layer in self.value_layers else -1

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element."""
        return STORED[self.dtype].itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        elements = self.num_layers * self.head_dim + self.num_value_layers * self.v_dim
        return elements * self.num_kv_heads * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.token_bytes * self.page_size
