"""The paged KV pool: where keys and values lie, in which precision, with which scales. The layout is explicit, never guessed from
shapes."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.errors import KernelError

KvDtype = Literal["bf16", "fp8"]
E4M3_MAX = 448.0
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of a pool. `dtype` is that of stored elements: bfloat16, or float8 e4m3 with a scale for each layer and head."""

    num_layers: int
    num_pages: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp8"):
            raise KernelError(f"KvLayout: dtype must be bf16 or fp8, got {self.dtype!r}")
        if not 8 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            raise KernelError(
                f"KvLayout: head_dim must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {self.head_dim}"
            )
        if min(self.num_layers, self.num_pages, self.num_kv_heads, self.page_size) < 1:
            raise KernelError("KvLayout: all sizes must be positive")

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element."""
        return 2 if self.dtype == "bf16" else 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.token_bytes * self.page_size


@dataclass(frozen=True, slots=True)
class KvPool:
    """The pool's memory. fp8 codes are held as uint8; a stored element times its head's scale is the value."""

    layout: KvLayout
    k: torch.Tensor  # [num_layers, num_pages, num_kv_heads, page_size, head_dim]
    v: torch.Tensor
    k_scale: torch.Tensor  # float32 [num_layers, num_kv_heads]
    v_scale: torch.Tensor

    @classmethod
    def allocate(
        cls, layout: KvLayout, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None
    ) -> "KvPool":
        """A zeroed pool; scales default to 1. Raises KernelError for a scale that is not a positive finite number."""
        shape = (layout.num_layers, layout.num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim)
        dtype = torch.bfloat16 if layout.dtype == "bf16" else torch.uint8
        k, v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        return cls(layout, k, v, _scale(layout, "k_scale", k_scale), _scale(layout, "v_scale", v_scale))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes

    def scrub(self, page: int) -> None:
        """Zero a page in all layers."""
        self.k[:, page].zero_()
        self.v[:, page].zero_()


def _scale(layout: KvLayout, name: str, scale: torch.Tensor | None) -> torch.Tensor:
    shape = (layout.num_layers, layout.num_kv_heads)
    if scale is None:
        return torch.ones(shape, dtype=torch.float32)
    if tuple(scale.shape) != shape or scale.dtype is not torch.float32:
        raise KernelError(f"KvPool: {name} must be float32 {list(shape)}, got {scale.dtype} {list(scale.shape)}")
    # A scale so small that its inverse overflows would turn into NaN at the first write.
    if not bool((torch.isfinite(scale) & (scale > 1e-30)).all()):
        raise KernelError(f"KvPool: {name} must be finite and positive")
    return scale.contiguous()


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which keys each query row sees: all of its sequence up to its own position, through the page table.

    Rows of one sequence are adjacent and ascending in position.
    """

    page_table: torch.Tensor  # int32 [num_sequences, max_pages]
    row_sequence: torch.Tensor  # int32 [num_rows]
    row_position: torch.Tensor  # int32 [num_rows]

    def check(self, op: str, layout: KvLayout) -> None:
        """Raise KernelError if a row could read outside the pool or the table."""
        sequence, position = self.row_sequence, self.row_position
        for name, tensor, ndim in (
            ("page_table", self.page_table, 2),
            ("row_sequence", sequence, 1),
            ("row_position", position, 1),
        ):
            if tensor.dtype is not torch.int32 or tensor.ndim != ndim or not tensor.is_contiguous():
                raise KernelError(f"{op}: {name} must be a contiguous int32 tensor of {ndim} dimensions")
        if len(sequence) != len(position):
            raise KernelError(f"{op}: row_sequence and row_position must have the same length")
        table = self.page_table.numpy()
        if table.size and not 0 <= table.min() <= table.max() < layout.num_pages:
            raise KernelError(f"{op}: page_table names a page outside the pool")
        rows, positions = sequence.numpy(), position.numpy()
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
            raise KernelError(f"{op}: row_sequence names a sequence outside the page table")
        if len(positions) and not 0 <= positions.min() <= positions.max() < table.shape[1] * layout.page_size:
            raise KernelError(f"{op}: row_position lies outside the page table")
