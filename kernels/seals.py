"""The secret numbers that seals are made of, and the place of the seals. `docs/integrity.md` has the construction and its bounds."""

import hashlib
from dataclasses import dataclass, fields

import numpy as np
import torch

from kernels.errors import KernelError
from kernels.kv_layout import KvLayout

NUM_SUMS = 2
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SealKeys:
    """Secret coefficients for one pool. Whoever knows them can forge seals: they never leave the process."""

    k_words: torch.Tensor  # int16 [2, words of a head's keys in a page]
    v_words: torch.Tensor  # int16 [2, words of a head's values in a page]
    rows: torch.Tensor  # int32 [page_size + 1, 2], the sum of the first n slots' row constants
    factor: torch.Tensor  # int64 [num_layers, num_kv_heads], odd: what a page's key is multiplied with
    offset: torch.Tensor  # int64 [num_layers, num_kv_heads]
    scales: torch.Tensor  # int64 [2], odd: what the bits of k_scale and v_scale are multiplied with

    @classmethod
    def derive(cls, secret: bytes, layout: KvLayout) -> "SealKeys":
        """From 32 secret bytes or more, by SHAKE-256. Raises KernelError for fp8 pages with an odd number of tokens."""
        if len(secret) < 32:
            raise KernelError("SealKeys: the secret must have 32 bytes at least")
        if layout.page_size * layout.element_bytes % 2 and not layout.is_latent:
            raise KernelError("SealKeys: fp8 pages need an even number of tokens")
        row_words = layout.page_size * layout.element_bytes
        k_words, v_words = row_words * layout.head_dim // 2, row_words * layout.v_dim // 2
        pairs = layout.num_layers * layout.num_kv_heads
        sizes = (4 * k_words, 4 * v_words, 8 * layout.page_size, 8 * pairs, 8 * pairs, 16)
        stream = bytearray(hashlib.shake_256(b"sluicegate page seal v1" + secret).digest(sum(sizes)))
        parts = []
        for size in sizes:
            parts.append(
                torch.frombuffer(stream[:size], dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            )
            stream = stream[size:]
        rows = parts[2].view(torch.int32).view(layout.page_size, NUM_SUMS).to(torch.int64).cumsum(dim=0)
        shape = (layout.num_layers, layout.num_kv_heads)
        return cls(
            # Copies begin at a multiple of 64 bytes, as the kernels' loads do.
            k_words=parts[0].view(torch.int16).view(NUM_SUMS, k_words).clone(),
            v_words=parts[1].view(torch.int16).view(NUM_SUMS, v_words).clone(),
            rows=torch.cat([torch.zeros(1, NUM_SUMS, dtype=torch.int64), rows]).to(torch.int32).contiguous(),
            factor=parts[3].view(torch.int64).view(shape) | 1,
            offset=parts[4].view(torch.int64).view(shape).clone(),
            scales=parts[5].view(torch.int64) | 1,
        )

    def to(self, device: torch.device) -> "SealKeys":
        """The same numbers there."""
        return SealKeys(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class PageSeals:
    """A pool's seals: two sums of 32 bits, the first in the low half."""

    keys: SealKeys
    tags: torch.Tensor  # int64 [num_layers, num_pages, num_kv_heads]
    value_layers: torch.Tensor  # int32 [num_layers], the place of a layer's values among those of all, or -1

    @classmethod
    def allocate(cls, secret: bytes, layout: KvLayout, device: torch.device = _CPU) -> "PageSeals":
        """Room for all pages, where the pool lies; none has a valid seal before it is opened."""
        shape = (layout.num_layers, layout.num_pages, layout.num_kv_heads)
        places = [layout.value_index(layer) for layer in range(layout.num_layers)]
        return cls(
            SealKeys.derive(secret, layout).to(device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.tensor(places, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class SealCheck:
    """What a pass expects of the pages that it reads, and what it found."""

    page_keys: torch.Tensor  # int64 [num_sequences, max_pages], the key of each page of the table
    num_tokens: torch.Tensor  # int32 [num_sequences], tokens whose rows must be in the pages by now
    violations: torch.Tensor  # int64 [num_sequences], 0, or 1 + layer * max_pages + the page's place in the table

    def note(self, violations: torch.Tensor, max_pages: int) -> None:
        """Take over what was found for these sequences, int64 [num_sequences] on the CPU, by a pass whose table has another width."""
        found, own = violations.numpy(), self.violations.numpy()
        if not found.any():
            own[:] = 0
            return
        layer, place = np.divmod(found - 1, max_pages)
        own[:] = np.where(found > 0, 1 + layer * self.page_keys.shape[1] + place, 0)

    def violation(self, sequence: int) -> tuple[int, int] | None:
        """(layer, place in the table) of a page of the sequence that failed."""
        found = int(self.violations[sequence])
        return divmod(found - 1, self.page_keys.shape[1]) if found else None
