"""Sequences whose latent vectors lie in scattered pages, and queries for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.backend import Backend
from kernels.indexer_topk import indexer_topk
from kernels.kv_pool import AttentionRows, KvLayout, KvPool
from kernels.kv_write import kv_write
from kernels.mla_attention import mla_attention

SCALE = 0.17


@dataclass(frozen=True)
class LatentCase:
    """A pool, queries for the last tokens of each sequence, and what the pool should hold."""

    pool: KvPool
    layer: int
    q_latent: torch.Tensor  # float32 [T, heads, L]
    q_rope: torch.Tensor  # float32 [T, heads, R]
    index_q: torch.Tensor  # float32 [T, index heads, v_dim]
    index_weights: torch.Tensor  # float32 [T, index heads]
    rows: AttentionRows
    keys: list[torch.Tensor]  # of each sequence: float64 [length, L + R]
    index_keys: list[torch.Tensor]  # float64 [length, v_dim]

    def some(self, rows: slice | list[int]) -> "LatentCase":
        """The same for some of the query rows."""
        fewer = AttentionRows(
            self.rows.page_table, self.rows.row_sequence[rows].contiguous(), self.rows.row_position[rows].contiguous()
        )
        return replace(
            self, q_latent=self.q_latent[rows], q_rope=self.q_rope[rows], index_q=self.index_q[rows],
            index_weights=self.index_weights[rows], rows=fewer,
        )  # fmt: skip

    def attend(self, backend: Backend, selected: torch.Tensor | None = None, **options) -> torch.Tensor:
        """The result for all query rows."""
        self.rows.check("test", self.pool.layout)
        return mla_attention(
            self.q_latent, self.q_rope, self.pool, self.layer, self.rows, softmax_scale=SCALE, selected=selected,
            backend=backend, **options,
        )  # fmt: skip

    def choose(self, backend: Backend, num_selected: int, **options) -> torch.Tensor:
        """The positions for all query rows."""
        return indexer_topk(
            self.index_q, self.index_weights, self.pool, self.layer, self.rows, num_selected, backend=backend, **options
        )

    def exact(self, selected: torch.Tensor | None = None) -> torch.Tensor:
        """Float64, from the latent vectors themselves: it knows no pages."""
        out = []
        for row, (sequence, position) in enumerate(zip(self.rows.row_sequence, self.rows.row_position, strict=True)):
            keys = self.keys[int(sequence)][: int(position) + 1]
            if selected is not None:
                keys = keys[selected[row][selected[row] >= 0].long()]
            query = torch.cat([self.q_latent[row], self.q_rope[row]], dim=1).double()
            weights = torch.softmax(query @ keys.T * SCALE, dim=1)
            out.append(weights @ keys[:, : self.q_latent.shape[2]])
        return torch.stack(out)

    def exact_choice(self, num_selected: int) -> torch.Tensor:
        """The positions by float64 scores."""
        out = torch.full((len(self.index_q), num_selected), -1, dtype=torch.int32)
        for row, (sequence, position) in enumerate(zip(self.rows.row_sequence, self.rows.row_position, strict=True)):
            keys = self.index_keys[int(sequence)][: int(position) + 1]
            scores = (self.index_weights[row].double()[:, None] * (self.index_q[row].double() @ keys.T).relu()).sum(
                dim=0
            )
            chosen = scores.argsort(descending=True, stable=True)[:num_selected].sort().values
            out[row, : len(chosen)] = chosen.int()
        return out


def _through_storage(values: torch.Tensor, scale: float, dtype: str) -> torch.Tensor:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[dtype]
    return (values / torch.tensor(scale)).to(kind).double() * torch.tensor(scale).double()


def _poison(pool: KvPool) -> None:
    for side in (pool.stored_k, pool.v):
        side.view(torch.uint8).fill_(0xFF)


@pytest.fixture(scope="session")
def make_latent() -> Callable[..., LatentCase]:
    """A function of sizes and, for each sequence, its length and how many of its last tokens ask. Pages are shuffled; what nobody wrote is NaN."""

    def make(
        lengths: list[int], asking: list[int], *, heads: int = 5, latent: int = 24, rope: int = 8, page_size: int = 4, dtype: str = "bf16",
        index_dim: int = 16, index_heads: int = 3, scale: float = 1.0, backend: Backend = Backend.REF,
        placed_for: Backend = Backend.CPU, secret: bytes | None = None, poison: bool = True,
    ) -> LatentCase:  # fmt: skip
        num_pages = sum(-(-length // page_size) for length in lengths) + 3
        layout = KvLayout(
            2, num_pages, 1, latent + rope, page_size, dtype, index_dim, (1,) if index_dim else (), is_latent=True
        )
        scales = torch.full((2, 1), scale)
        pool = KvPool.allocate(layout, scales, scales, secret, placed_for)
        if poison and secret is None:
            _poison(pool)
        unused = torch.randperm(num_pages, dtype=torch.int32)
        table = torch.zeros(len(lengths), max(lengths) // page_size + 1, dtype=torch.int32)
        keys, index_keys, sequences, positions = [], [], [], []
        for index, (length, count) in enumerate(zip(lengths, asking, strict=True)):
            k, v = torch.randn(length, 1, latent + rope), torch.randn(length, 1, index_dim)
            place, used = torch.arange(length), -(-length // page_size)
            table[index, :used], unused = unused[:used], unused[used:]
            slots = table[index, place // page_size].long() * page_size + place % page_size
            kv_write(k, v if index_dim else None, slots, pool, 1, backend=backend)
            keys.append(_through_storage(k[:, 0], scale, dtype))
            index_keys.append(_through_storage(v[:, 0], scale, dtype))
            sequences += [index] * count
            positions += range(length - count, length)
        total = len(positions)
        rows = AttentionRows(
            table, torch.tensor(sequences, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
        )
        return LatentCase(
            pool, 1, torch.randn(total, heads, latent), torch.randn(total, heads, rope),
            torch.randn(total, index_heads, index_dim), torch.randn(total, index_heads), rows, keys, index_keys,
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def random_choice() -> Callable[[LatentCase, int], torch.Tensor]:
    """Ascending positions for each row, at most so many and not beyond its own, the rest -1."""

    def choose(case: LatentCase, count: int) -> torch.Tensor:
        selected = torch.full((len(case.q_latent), count), -1, dtype=torch.int32)
        for row, position in enumerate(case.rows.row_position.tolist()):
            chosen = torch.randperm(position + 1)[: int(torch.randint(1, count + 1, ()))].sort().values
            selected[row, : len(chosen)] = chosen.int()
        return selected

    return choose
