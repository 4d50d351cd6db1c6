"""Recorded forward passes give the bits of passes computed op by op."""

import pytest
import torch

from kernels.backend import resolve
from kernels.errors import KernelError
from worker.model import recorded_steps
from worker.model.errors import ModelError
from worker.model.load import LoadedModel, load_model
from worker.model.step import StepInput


@pytest.fixture(scope="module")
def loaded(smollm2_path) -> LoadedModel:
    return load_model(smollm2_path, resolve("cpu"))


def _decode(run, names, steps: int) -> list[torch.Tensor]:
    return [logits.clone() for step in range(steps) for logits in run.feed(*[(name, [100 + step]) for name in names])]


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_recorded_equals_computed(loaded, paged_run, dtype, monkeypatch) -> None:
    """Prompts of odd lengths and decode steps of one to three sequences, first recorded, then with recording off."""

    def run_all() -> list[torch.Tensor]:
        run = paged_run(loaded, dtype)
        outs = [x.clone() for x in run.feed(("a", range(50, 83)), ("b", range(9)), ("c", [7]))]
        for names in (["a"], ["a", "b"], ["a", "b", "c"], ["b"]):
            outs += _decode(run, names, 3)
        return outs

    recorded = run_all()
    assert loaded.model._recorded._recorded
    monkeypatch.setattr(recorded_steps.RecordedSteps, "takes", lambda self, step: False)
    computed = run_all()
    assert all(torch.equal(a, b) for a, b in zip(recorded, computed, strict=True))


def test_shapes_are_bounded(loaded, paged_run, monkeypatch) -> None:
    """The oldest shape is forgotten when there are too many, and recorded anew when it comes back."""
    monkeypatch.setattr(recorded_steps, "MAX_SHAPES", 2)
    run = paged_run(loaded)
    run.feed(("a", [1, 2, 3]))
    first = run.feed(("b", [5]))[0].clone()
    for count in (2, 3, 4, 1):
        run.feed((f"more{count}", list(range(count))))
    assert 2 == len(loaded.model._recorded._recorded)
    assert torch.equal(first, run.feed(("c", [5]))[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", torch.tensor([49152])), ("token_ids", torch.tensor([-1])),
        ("slots", torch.tensor([64 * 16])), ("slots", torch.tensor([-2])), ("logit_rows", torch.tensor([1])),
        ("positions", torch.tensor([8192], dtype=torch.int32)), ("page_table", torch.tensor([[64]], dtype=torch.int32)),
    ],
)  # fmt: skip
def test_a_recorded_pass_checks_its_input(loaded, paged_run, field, value) -> None:
    """What a recorded pass would read or write outside of its memory is an error each time, not only when it is recorded."""
    run = paged_run(loaded)
    run.feed(("a", [1]))
    fields = {
        "token_ids": torch.tensor([1]), "positions": torch.tensor([0], dtype=torch.int32), "slots": torch.tensor([0]),
        "page_table": torch.zeros(1, 1, dtype=torch.int32), "row_sequence": torch.zeros(1, dtype=torch.int32),
        "logit_rows": torch.tensor([0]),
    }  # fmt: skip
    loaded.model.forward(StepInput(**fields), run.pool)
    with pytest.raises((ModelError, KernelError), match=r"^forward: "):
        loaded.model.forward(StepInput(**(fields | {field: value})), run.pool)
