"""A layer's feed-forward as a mixture of experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.errors import KernelError
from kernels.expert_weights import ExpertMatrices, Experts
from kernels.moe import Routing, moe
from kernels.weights import Weight
from worker.model.checkpoint import Checkpoint
from worker.model.config import ExpertsConfig
from worker.model.errors import ModelError
from worker.model.feed_forward import SHARED_ROLES, GatedFeedForward
from worker.model.projection import Projection
from worker.model.tensors import can_stack, packed_together
from worker.model.workspace import Buffer, Workspace


@dataclass(frozen=True, slots=True)
class MixtureFeedForward:
    """A router chooses some experts for each row (Shazeer et al., 2017); a shared feed-forward, if there is one, serves all rows."""

    router: Projection
    routing: Routing
    experts: Experts
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
        )
        shared = None
        if config.shared_size:
            shared = GatedFeedForward.load(checkpoint, layer, config.shared_size, backend, roles=SHARED_ROLES)
        return cls(
            router=Projection.load(checkpoint, layer, {"router": (count, hidden)}, backend),
            routing=routing,
            experts=_load_experts(checkpoint, layer, config),
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


def _load_experts(checkpoint: Checkpoint, layer: int, config: ExpertsConfig) -> Experts:
    hidden, size = checkpoint.config.hidden_size, config.size

    def matrices(shapes: dict[str, tuple[int, int]]) -> Iterator[Weight]:
        for expert in range(config.num_experts):
            parts = [checkpoint.matrix(role, layer, shape, expert) for role, shape in shapes.items()]
            source = f"{checkpoint.label}: {checkpoint.tensor_name(next(iter(shapes)), layer, expert)}"
            if not can_stack(parts):
                raise ModelError(f"{source}: gate and up of an expert must have one format")
            yield packed_together(parts, source)

    def gathered(shapes: dict[str, tuple[int, int]]) -> ExpertMatrices:
        try:
            return ExpertMatrices.gather(config.num_experts, matrices(shapes), checkpoint.memory)
        except KernelError as error:
            name = checkpoint.tensor_name(next(iter(shapes)), layer, 0)
            raise ModelError(f"{checkpoint.label}: {name}: {error}") from None

    gate_up = gathered({"expert_gate": (size, hidden), "expert_up": (size, hidden)})
    return Experts(gate_up, gathered({"expert_down": (hidden, size)}))
