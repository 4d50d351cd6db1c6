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


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of a pool. `dtype` is that of stored elements: bfloat16, float16, or float8 e4m3 with a scale for each layer and head."""

    num_layers: int
    num_pages: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise KernelError(f"KvLayout: dtype must be bf16, fp16 or fp8, got {self.dtype!r}")
        if not 8 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            raise KernelError(
                f"KvLayout: head_dim must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {self.head_dim}"
            )
        if min(self.num_layers, self.num_pages, self.num_kv_heads, self.page_size) < 1:
            raise KernelError("KvLayout: all sizes must be positive")

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element."""
        return STORED[self.dtype].itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.token_bytes * self.page_size
