"""The paged KV pool: where keys and values lie, in which precision, with which scales."""

from dataclasses import dataclass

import numpy as np
import torch

from kernels import huge_pages
from kernels.backend import Backend, device_of
from kernels.errors import KernelError
from kernels.kv_layout import E4M3_MAX, FP16_MAX, MAX_HEAD_DIM, MAX_LATENT_DIM, STORED, KvDtype, KvLayout
from kernels.seals import PageSeals

__all__ = [
    "E4M3_MAX",
    "FP16_MAX",
    "MAX_HEAD_DIM",
    "MAX_LATENT_DIM",
    "AttentionPlan",
    "AttentionRows",
    "KvDtype",
    "KvLayout",
    "KvPool",
]

TILE_TOKENS = 32  # rows of a sequence that an item of a plan may hold


@dataclass(frozen=True, slots=True)
class KvPool:
    """The pool's memory. fp8 codes are held as uint8; a stored element times its head's scale is the value.

    Within a page and head, keys lie by dimension and values by token: attention multiplies a query's element with many keys, and a key's
    weight with many elements of its value, and reads neighbours either way. On a GPU the keys' memory lies by token, and `k` is a view of it;
    so it is in a latent pool anywhere, whose keys are values too.
    """

    layout: KvLayout
    k: torch.Tensor  # [num_layers, num_pages, num_kv_heads, head_dim, page_size]
    v: torch.Tensor  # [num_value_layers, num_pages, num_kv_heads, page_size, v_dim]
    k_scale: torch.Tensor  # float32 [num_layers, num_kv_heads]
    v_scale: torch.Tensor
    seals: PageSeals | None = None

    @classmethod
    def allocate(
        cls,
        layout: KvLayout,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        seal_secret: bytes | None = None,
        backend: Backend = Backend.CPU,
    ) -> "KvPool":
        """A zeroed pool where the backend reads it; scales default to 1; pages are sealed if there is a secret for it.

        Raises KernelError for a scale that is not a positive finite number.
        """
        pages, size, device = (layout.num_pages, layout.num_kv_heads), layout.page_size, device_of(backend)
        is_by_token = layout.is_latent or backend is Backend.GPU
        part = (size, layout.head_dim) if is_by_token else (layout.head_dim, size)
        k = torch.empty(layout.num_layers, *pages, *part, dtype=STORED[layout.dtype], device=device)
        v = torch.empty(layout.num_value_layers, *pages, size, layout.v_dim, dtype=k.dtype, device=device)
        for memory in (k, v):
            if backend is Backend.CPU:
                huge_pages.ask_for(memory)
            memory.zero_()
        k = k.transpose(3, 4) if is_by_token else k
        seals = None if seal_secret is None else PageSeals.allocate(seal_secret, layout, device)
        scales = [
            _scale(layout, name, scale).to(device) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        ]
        return cls(layout, k, v, scales[0], scales[1], seals)

    @property
    def k_rows(self) -> torch.Tensor:
        """The keys' memory seen by token, as the values lie: [num_layers, num_pages, num_kv_heads, page_size, head_dim]."""
        return self.k.transpose(3, 4)

    @property
    def stored_k(self) -> torch.Tensor:
        """The keys in the order in which they lie: `k` or `k_rows`."""
        return self.k if self.k.stride(-1) == 1 else self.k_rows

    def values_of(self, layer: int) -> torch.Tensor | None:
        """A layer's values [num_pages, num_kv_heads, page_size, v_dim], if it has any."""
        index = self.layout.value_index(layer)
        return None if index < 0 else self.v[index]

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


def check_pool(op: str, pool: KvPool, backend: Backend) -> None:
    """Raise KernelError for a pool that was allocated for another backend."""
    keys = pool.k_rows if backend is Backend.GPU or pool.layout.is_latent else pool.k
    if keys.device.type != device_of(backend).type or not (keys.is_contiguous() or backend is Backend.REF):
        raise KernelError(f"{op}: the pool is not laid out for {backend}")


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a GPU's programs share the rows: each item is the number of a first row and a count of rows, int32 [num_items, 2]."""

    singles: torch.Tensor  # sequences with one row in this step
    tiles: torch.Tensor  # up to TILE_TOKENS rows of one sequence


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which keys each query row sees: all of its sequence up to its own position, through the page table.

    Rows of one sequence are adjacent and ascending in position. On a GPU, a row at a negative position is padding: it sees nothing, and
    its result is zero. There `plan` is needed too: `planned` makes one.
    """

    page_table: torch.Tensor  # int32 [num_sequences, max_pages]
    row_sequence: torch.Tensor  # int32 [num_rows]
    row_position: torch.Tensor  # int32 [num_rows]
    plan: AttentionPlan | None = None

    def planned(self) -> AttentionPlan:
        """The plan for these rows; they and it lie on the CPU."""
        sequence = self.row_sequence.numpy()
        starts = np.flatnonzero(np.diff(sequence, prepend=-1))
        counts = np.diff(starts, append=len(sequence))
        tiles = [
            (first, min(TILE_TOKENS, start + count - first))
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
            if count > 1
            for first in range(start, start + count, TILE_TOKENS)
        ]
        singles = [(start, 1) for start in starts[counts == 1].tolist()]
        return AttentionPlan(*(torch.tensor(items, dtype=torch.int32).view(-1, 2) for items in (singles, tiles)))

    def to(self, device: torch.device) -> "AttentionRows":
        """These rows, which lie on the CPU, and the plan for them, on a GPU. Call `check` first: nothing can be checked there."""
        plan = self.planned()
        return AttentionRows(
            self.page_table.to(device), self.row_sequence.to(device), self.row_position.to(device),
            AttentionPlan(plan.singles.to(device), plan.tiles.to(device)),
        )  # fmt: skip

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
