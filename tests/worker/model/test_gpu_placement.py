"""Everything that a model computes with lies on the device, and nothing in a pass looks at a number there.

The device is torch's "meta", whose tensors have shapes and no numbers: a look raises an error, as does a tensor that was left on the CPU.
Kernels aren't started, but what they would be given is looked at.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

import kernels.backend
import kernels.placement
from kernels.backend import Backend
from kernels.kv_pool import KvPool
from kernels.seals import SealCheck
from worker.cache.page_pool import PageId
from worker.model import architectures
from worker.model.device_steps import DeviceSteps
from worker.model.load import LoadedModel, load_model
from worker.model.step import StepInput
from worker.seal_keeper import SealKeeper
from worker.sealing import SealPlan

META, CPU = torch.device("meta"), torch.device("cpu")
NUM_PAGES, MAX_SEQUENCES, STEP_TOKENS = 80, 5, 40
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "glm4_moe", "deepseek_v3", "glm_moe_dsa")


class OneDevice(TorchDispatchMode):
    """No op may take tensors of two devices, but for copies; and nobody may wait for a copy to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        options = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            assert len(devices) < 2 or options.get("non_blocking", args[-1] is True), "waits for a copy"
        else:
            assert len(devices) < 2, func
        if func is torch.ops.aten._to_copy.default:
            assert options.get("non_blocking") or options.get("device", CPU) == CPU, "waits for a copy"
        return func(*args, **(kwargs or {}))


def _start_nothing(self: interpreter.GridExecutor, *args: Any, **options: Any) -> None:
    """In place of a kernel, which sees more tensors than ops do: those of named tuples too must lie on the device."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    assert tensors
    assert {META} == {tensor.device for tensor in tensors}, self.fn


def _replace_everywhere(patch: pytest.MonkeyPatch, name: str, old: object, new: object) -> None:
    """In all modules that have it under this name."""
    for module in [module for key, module in sys.modules.items() if key.startswith(("kernels.", "worker."))]:
        if getattr(module, name, None) is old:
            patch.setattr(module, name, new)


@pytest.fixture(scope="module")
def meta_gpu() -> Iterator[None]:
    """A Hopper that holds no numbers, and on which kernels start and do nothing. Matrices are laid out on the CPU first."""
    place = kernels.placement.place

    def place_on_meta(weight: object, backend: Backend) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(kernels.placement, "device_of", lambda backend: CPU)
            placed = place(weight, backend)
        parts = {field.name: getattr(placed, field.name) for field in dataclasses.fields(placed)}
        return dataclasses.replace(
            placed, **{name: part.to(META) for name, part in parts.items() if isinstance(part, torch.Tensor)}
        )

    with pytest.MonkeyPatch.context() as patch:
        on_meta = {Backend.GPU: META}
        _replace_everywhere(patch, "place", place, place_on_meta)
        _replace_everywhere(patch, "device_of", kernels.backend.device_of, lambda backend: on_meta.get(backend, CPU))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
        patch.setattr(interpreter.GridExecutor, "__call__", _start_nothing)
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(
    request: pytest.FixtureRequest, meta_gpu: None, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    """A tiny model of each family."""
    model = tiny_models.make(request.param)
    folder: Path = tiny_models.save(model, tmp_path_factory.mktemp(request.param), torch.bfloat16)
    return load_model(folder, Backend.GPU)


@pytest.mark.parametrize("checks_reads", [False, True])
def test_nothing_is_looked_at(loaded: LoadedModel, checks_reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing, a mixed step of prompts and decode rows, and decode steps of some sequences run without a number; so does keeping and verifying seals."""
    fetched: list[tuple[list[tuple[int, ...]], bool]] = []

    def note(self: DeviceSteps, parts: Any, step: StepInput, placed: StepInput) -> None:
        assert META == placed.positions.device
        fetched.append(([tuple(part.shape) for part in parts], placed.seal_check is not None))

    monkeypatch.setattr(DeviceSteps, "_fetched", note)
    layout = loaded.kv_layout(NUM_PAGES, 16, "fp8")
    pool = KvPool.allocate(layout, seal_secret=b"s" * 32 if checks_reads else None, backend=Backend.GPU)
    assert META == pool.k.device
    with OneDevice():
        loaded.model.prepare(pool, MAX_SEQUENCES, STEP_TOKENS, checks_reads=checks_reads)
        assert {checks_reads} == {has_check for _, has_check in fetched}
        fetched.clear()
        for counts, logit_rows in (([20, 1, 1], [19, 20, 21]), ([1, 1, 1], [0, 1, 2])):
            loaded.model.forward(_step(counts, logit_rows, has_check=checks_reads), pool)
        if checks_reads:
            plan = SealPlan(opened=[(PageId(3), 5)], rekeyed=[(PageId(1), 5, 6), (PageId(2), 7, 8)])
            SealKeeper(pool, Backend.GPU).carry_out(plan)
    assert [([(3, loaded.config.vocab_size)], checks_reads)] * 2 == fetched


def _step(counts: list[int], logit_rows: list[int], *, has_check: bool) -> StepInput:
    """Sequences with so many rows each, of two pages."""
    rows = sum(counts)
    positions = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
    sequences = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    table = torch.arange(2 * len(counts), dtype=torch.int32).view(-1, 2)
    slots = table[sequences.long(), positions.long() // 16].long() * 16 + positions % 16
    numbers = torch.zeros(len(counts), dtype=torch.int64)
    check = SealCheck(table.long(), numbers.int(), numbers) if has_check else None
    ids = torch.zeros(rows, dtype=torch.int64)
    return StepInput(ids, positions, slots, table, sequences, torch.tensor(logit_rows), check)


def test_every_way_to_build_a_model_is_here() -> None:
    """One that is added is tested here too."""
    known = architectures._ARCHITECTURES
    assert {one.build for one in known.values()} == {known[family].build for family in FAMILIES}
