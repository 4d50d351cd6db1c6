"""What fits on a set of GPUs, how fast a decode step can be at best, and what a token costs then.

A group of `tp` GPUs holds the weights once, divided; `count / tp` groups hold them as often and share nothing. Each GPU gives `memory_fraction` of its memory
to weights and KV; the rest is for activations, graphs, communication and the driver.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from sluicegate.errors import CommandError
from sluicegate.plan.cards import GIB, MIB, Card
from sluicegate.plan.parts import Part, parts
from sluicegate.plan.precision import Policy
from sluicegate.plan.shape import GroupedAttention, ModelShape

KV_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
SEAL_BYTES = 8  # for each (layer, kv head, page), docs/integrity.md


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode step of `batch` sequences in each group, all at the planned context, if memory were all that takes time."""

    batch: int
    bytes_per_gpu: float
    experts_read: float
    seconds: float
    tokens_per_second: float
    cost_per_million: float | None


@dataclass(frozen=True)
class Plan:
    """A question and, as properties, its answers."""

    shape: ModelShape
    policy: Policy
    kv_format: str
    card: Card
    count: int
    tp: int
    context: int
    concurrency: int | None
    memory_fraction: float
    page_size: int
    gpu_hour: float | None
    holds_mtp: bool

    def __post_init__(self) -> None:
        """Raises CommandError for what cannot be."""
        heads = self.shape.attention.num_heads
        if self.count % self.tp:
            raise CommandError(f"--count {self.count} is no multiple of --tp {self.tp}")
        if heads % self.tp:
            raise CommandError(f"--tp {self.tp} does not divide the {heads} heads of {self.shape.name}")
        if self.context > self.shape.context:
            raise CommandError(
                f"--context {self.context} is longer than {self.shape.name} allows ({self.shape.context})"
            )

    def but(self, **changes: object) -> "Plan":
        """The same question with some things changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @cached_property
    def parts(self) -> list[Part]:
        return parts(self.shape)

    @property
    def num_groups(self) -> int:
        return self.count // self.tp

    # Parameters and weights

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Numbers by group of tensors."""
        sums: dict[str, int] = {}
        for part in self.parts:
            sums[part.group] = sums.get(part.group, 0) + part.num_parameters
        return sums

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with: chosen experts, no embedding unless it's the head, no prediction layer."""
        return round(sum(p.num_parameters * self._read_share(p, 1) for p in self.parts if not p.is_mtp))

    def checkpoint_bytes(self, policy: Policy) -> int:
        """Of all tensors, prediction layers included."""
        return sum(policy.num_bytes(part) for part in self.parts)

    @cached_property
    def weights_per_gpu(self) -> dict[str, float]:
        """Bytes by group of tensors on one GPU."""
        sums: dict[str, float] = {}
        for part in self.parts:
            if self.holds_mtp or not part.is_mtp:
                sums[part.group] = sums.get(part.group, 0.0) + self.policy.num_bytes(part) * self._gpu_share(part)
        return sums

    def _gpu_share(self, part: Part) -> float:
        return {"even": 1 / self.tp, "kv": self._kv_share, "copy": 1.0}[part.share]

    @property
    def _kv_share(self) -> float:
        """KV heads on one GPU of all: at least one. A latent is for all heads, so each GPU has it."""
        if not isinstance(self.shape.attention, GroupedAttention):
            return 1.0
        num_kv_heads = self.shape.attention.num_kv_heads
        return -(-num_kv_heads // self.tp) / num_kv_heads

    # KV cache

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one copy, all layers."""
        values = self.shape.num_layers * self.shape.attention.kv_values_per_token
        if self.shape.indexer:
            values += self.shape.indexer.num_owners * self.shape.indexer.head_dim
        return values * KV_BYTES[self.kv_format]

    @property
    def kv_bytes_per_token_and_gpu(self) -> float:
        return self.kv_bytes_per_token * self._kv_share

    @property
    def seal_bytes_per_token(self) -> float:
        """What the integrity modes `seal` and `full` keep beside the pages; not part of the figures above."""
        attention = self.shape.attention
        heads = attention.num_kv_heads if isinstance(attention, GroupedAttention) else 1
        return SEAL_BYTES * heads * self.shape.num_layers / self.page_size

    @property
    def usable_bytes(self) -> float:
        """Of one GPU, for weights and KV."""
        return self.card.memory_bytes * self.memory_fraction

    @property
    def pool_bytes(self) -> float:
        """Of one GPU, for KV; negative if the weights alone are too much."""
        return self.usable_bytes - sum(self.weights_per_gpu.values())

    @property
    def tokens_per_group(self) -> int:
        """Tokens of KV that one group of GPUs holds, in whole pages."""
        pages = self.pool_bytes // (self.kv_bytes_per_token_and_gpu * self.page_size)
        return max(0, int(pages)) * self.page_size

    @property
    def tokens(self) -> int:
        """Tokens of KV that all GPUs hold."""
        return self.tokens_per_group * self.num_groups

    @property
    def requests_that_fit(self) -> int:
        """Requests of `context` tokens at the same time, on all GPUs."""
        return self.tokens_per_group // _whole_pages(self.context, self.page_size) * self.num_groups

    @property
    def fits(self) -> bool:
        return self.requests_that_fit >= (self.concurrency or 1)

    @property
    def missing_bytes_per_gpu(self) -> float:
        """What one GPU lacks for the requests that are asked for; 0 if it all fits."""
        per_group = -(-(self.concurrency or 1) // self.num_groups)
        tokens = per_group * _whole_pages(self.context, self.page_size)
        return max(0.0, tokens * self.kv_bytes_per_token_and_gpu - self.pool_bytes)

    # Speed and price

    def experts_read(self, batch: int) -> float:
        """Different experts of a layer that `batch` tokens choose, expected, if choices were even and independent: E (1 - (1 - k/E)^batch)."""
        experts = self.shape.experts
        if experts is None:
            return 0.0
        return experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** batch)

    def _read_share(self, part: Part, batch: int) -> float:
        if part.reads == "experts" and self.shape.experts:
            return self.experts_read(batch) / self.shape.experts.num_experts
        return min(1.0, batch / part.rows) if part.reads == "row" else 1.0

    def kv_bytes_read(self) -> float:
        """By one GPU, of one sequence at `context`, in a step. Windows and indexers limit what a layer reads; an indexer's keys are read whole."""
        shape, size = self.shape, KV_BYTES[self.kv_format]
        reach = min(self.context, shape.indexer.top_k) if shape.indexer else self.context
        tokens = (shape.num_layers - shape.num_window_layers) * reach
        tokens += shape.num_window_layers * min(self.context, shape.window)
        values = tokens * shape.attention.kv_values_per_token * self._kv_share
        if shape.indexer:
            values += self.context * shape.indexer.num_owners * shape.indexer.head_dim
        return values * size

    def decode(self, batch: int) -> Decode:
        """The floor of a step of `batch` sequences in each group: bytes that one GPU must read, over its bandwidth."""
        weights = sum(
            self.policy.num_bytes(part) * self._gpu_share(part) * self._read_share(part, batch)
            for part in self.parts
            if not part.is_mtp
        )
        moved = weights + batch * self.kv_bytes_read()
        seconds = moved / self.card.bandwidth
        rate = batch * self.num_groups / seconds
        cost = None if self.gpu_hour is None else self.gpu_hour * self.count / 3600 / rate * 1e6
        return Decode(batch, moved, self.experts_read(batch), seconds, rate, cost)

    def decodes(self) -> list[Decode]:
        """At one sequence, and at as many as are asked for or fit."""
        asked = self.concurrency or self.requests_that_fit
        full = -(-asked // self.num_groups)
        return [self.decode(batch) for batch in sorted({1, max(1, full)})]


def _whole_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size) * page_size


def gib(num_bytes: float) -> str:
    """A size as people read it."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / MIB:,.1f} MiB"
