"""How passes are prepared for a device, and how their logits come back: made-up passes, on the CPU."""

import gc
import weakref

import pytest
import torch

from kernels.backend import Backend
from kernels.kv_pool import KvLayout, KvPool
from worker.model.cuda_graphs import DecodeGraphs
from worker.model.device_steps import DeviceSteps, Parts
from worker.model.step import StepInput
from worker.model.step_memory import padding_step
from worker.model.workspace import Workspace

CPU = torch.device("cpu")
VOCABULARY, PAGES, MOST = 3, 64, 256


class Passes:
    """Passes whose logits are a wanted row's number, plus the place in the vocabulary; what they were asked for is noted."""

    def __init__(self, max_rows: int = 4) -> None:
        self.asked: list[object] = []
        self._parts: list[weakref.ref[torch.Tensor]] = []
        pool = KvPool.allocate(KvLayout(1, PAGES, 1, 8, 8, "bf16"), backend=Backend.GPU)
        parts = Parts(self._hidden, self._logits, lambda rows: Workspace.allocate((), rows, CPU), VOCABULARY, 8 * PAGES)
        self.steps = DeviceSteps(parts, pool, CPU, max_rows)

    def _hidden(self, step: StepInput, pool: KvPool, work: Workspace) -> torch.Tensor:
        self.asked.append((len(step.token_ids), len(step.logit_rows)))
        return step.logit_rows[:, None].float()

    def _logits(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        gc.collect()
        assert not [part for part in self._parts if part() is not None], "two parts at a time"
        found = x + torch.arange(VOCABULARY)
        if out is not None:
            return out.copy_(found)
        self._parts.append(weakref.ref(found))
        return found


def test_the_largest_step_runs_beside_the_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """First, as kernels are compiled; and last, when graphs hold what is theirs, which each recording takes from what others have freed."""
    passes = Passes()
    monkeypatch.setattr(DecodeGraphs, "prepare", lambda self, checks_reads: passes.asked.append("graphs"))
    passes.steps.prepare(700, checks_reads=True)
    assert (700, MOST) == passes.asked[0]
    assert ["graphs", (700, MOST)] == passes.asked[-2:]
    assert [(rows, min(rows, MOST)) for rows in (512, 256, 128, 64, 32, 16, 8, 4, 2)] == passes.asked[1:-2]


@pytest.mark.parametrize(("rows", "max_rows", "pinned"), [(255, 4, 255), (256, 4, 256), (600, 4, 256), (500, 512, 500)])
def test_logits_come_back_through_little_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, rows: int, max_rows: int, pinned: int
) -> None:
    """That of as many rows as are computed at a time, or as there may be sequences. All logits are there, in their order."""
    passes, shapes, empty = Passes(max_rows), [], torch.empty

    def noted(*shape: object, **options: object) -> torch.Tensor:
        if "pin_memory" in options:
            shapes.append(shape[0])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", noted)
    logits = passes.steps.run(padding_step(rows, 0, 1))
    assert torch.equal(torch.arange(float(rows))[:, None] + torch.arange(VOCABULARY), logits)
    assert (pinned, VOCABULARY) in shapes
    assert pinned == max(shape[0] for shape in shapes if isinstance(shape, tuple) and len(shape) == 2)
