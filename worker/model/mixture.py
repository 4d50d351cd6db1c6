"""A layer's feed-forward as a mixture of experts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from kernels.backend import Backend, device_of
from kernels.errors import KernelError
from kernels.expert_weights import ExpertMatrices, Experts
from kernels.moe import GpuExpertMatrices, GpuExperts, Routing, moe
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.config import ExpertsConfig
from worker.model.errors import ModelError
from worker.model.feed_forward import SHARED_ROLES, GatedFeedForward
from worker.model.projection import Projection
from worker.model.tensors import can_stack, packed_together
from worker.model.workspace import Buffer, Workspace

Gathered = TypeVar("Gathered")


@dataclass(frozen=True, slots=True)
class MixtureFeedForward:
    """A router chooses some experts for each row (Shazeer et al., 2017); a shared feed-forward, if there is one, serves all rows."""

    router: Projection
    routing: Routing
    experts: Experts | GpuExperts
    shared: GatedFeedForward | None
    logits: Buffer
    shared_out: Buffer
    backend: Backend

    @classmethod
    def load(cls, checkpoint: Checkpoint, layer: int, config: ExpertsConfig, backend: Backend) -> "MixtureFeedForward":
        """The mixture of a layer."""
        hidden, count = checkpoint.config.hidden_size, config.num_experts
        routing = Routing(
            num_experts=count,
            top_k=config.top_k,
            scoring=config.scoring,
            bias=checkpoint.vector("router_bias", layer, count) if config.has_bias else None,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            normalize=config.normalize,
            scale=config.scale,
        ).to(device_of(backend))
        shared = None
        if config.shared_size:
            shared = GatedFeedForward.load(checkpoint, layer, config.shared_size, backend, roles=SHARED_ROLES)
        return cls(
            router=Projection.load(checkpoint, layer, {"router": (count, hidden)}, backend),
            routing=routing,
            experts=_load_experts(checkpoint, layer, config, backend),
            shared=shared,
            logits=Buffer("router_logits", (count,)),
            shared_out=Buffer("shared", (hidden,)),
            backend=backend,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The memory that a call needs."""
        return (self.logits,) if self.shared is None else (self.logits, self.shared_out, *self.shared.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.router.nbytes + self.experts.nbytes + (0 if self.shared is None else self.shared.nbytes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, work: Workspace) -> None:
        """x float32 [T, hidden] -> out float32 [T, hidden]."""
        logits, added = work[self.logits], None
        self.router(x, logits)
        if self.shared is not None:
            added = work[self.shared_out]
            self.shared(x, added, work)
        moe(x, logits, self.experts, self.routing, added=added, out=out, backend=self.backend)


def _load_experts(checkpoint: Checkpoint, layer: int, config: ExpertsConfig, backend: Backend) -> Experts | GpuExperts:
    hidden, size = checkpoint.config.hidden_size, config.size

    def matrices(shapes: dict[str, tuple[int, int]]) -> Iterator[Weight]:
        for expert in range(config.num_experts):
            parts = [checkpoint.matrix(role, layer, shape, expert) for role, shape in shapes.items()]
            source = f"{checkpoint.label}: {checkpoint.tensor_name(next(iter(shapes)), layer, expert)}"
            if not can_stack(parts):
                raise ModelError(f"{source}: gate and up of an expert must have one format")
            yield packed_together(parts, source)

    def gathered(gather: Callable[[int, Iterator[Weight]], Gathered], shapes: dict[str, tuple[int, int]]) -> Gathered:
        try:
            return gather(config.num_experts, matrices(shapes))
        except KernelError as error:
            name = checkpoint.tensor_name(next(iter(shapes)), layer, 0)
            raise ModelError(f"{checkpoint.label}: {name}: {error}") from None

    gate_up, down = {"expert_gate": (size, hidden), "expert_up": (size, hidden)}, {"expert_down": (hidden, size)}
    if backend is Backend.GPU:
        return GpuExperts(gathered(GpuExpertMatrices.gather, gate_up), gathered(GpuExpertMatrices.gather, down))
    gather = partial(ExpertMatrices.gather, memory=checkpoint.memory)
    return Experts(gathered(gather, gate_up), gathered(gather, down))
