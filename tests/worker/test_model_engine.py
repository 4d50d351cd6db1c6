"""What a worker for a GPU makes ready, and what it says where the GPU can't do what it was told."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.kv_pool import KvPool
from kernels.page_seal import gpu as page_seal
from protocol.ids import ModelName
from worker.errors import SettingsError
from worker.model.decoder import Decoder
from worker.model_engine import preparation
from worker.settings import WorkerSettings

TOO_MUCH = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.94 GiB is free."

SEAL_OPS = ("open_pages_gpu", "rekey_pages_gpu", "verify_pages_gpu")


@pytest.fixture
def settings(tmp_path: Path, tiny_models: ModuleType) -> Callable[..., WorkerSettings]:
    """Of a worker for a GPU, with a tiny model."""

    def make(**changes: object) -> WorkerSettings:
        folder = tmp_path / "tiny"
        if not folder.exists():
            tiny_models.save(tiny_models.make("llama", num_hidden_layers=1), folder)
        usual = {
            "redis_url": "redis://127.0.0.1:1", "model_path": folder, "model_name": ModelName("m"), "job_signing_key": b"k" * 32,
            "namespace_secret": b"n" * 32, "kernels": "gpu", "integrity": "lease", "kv_tokens": 64, "max_sequences": 1, "step_tokens": 2,
        }  # fmt: skip
        return WorkerSettings(**(usual | changes))

    return make


@pytest.mark.parametrize("mode", ["lease", "seal", "full"])
def test_a_worker_on_a_gpu_is_prepared(
    settings: Callable[..., WorkerSettings], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Model, pages and passes are there before it says so, in every mode, and nothing of that is left in a page; so are the kernels for seals."""
    started: list[str] = []
    for name in SEAL_OPS:
        real = getattr(page_seal, name)
        monkeypatch.setattr(page_seal, name, lambda *args, name=name, real=real: started.append(name) or real(*args))
    prepared = preparation(settings(integrity=mode))()
    assert ([] if mode == "lease" else list(SEAL_OPS)) == started
    assert (mode != "lease") is prepared.engine.executor.has_seals
    kv = prepared.engine.executor.kv
    assert "gpu" == prepared.facts["kernels"]
    assert (kv.nbytes, 64) == (prepared.facts["kv_bytes"], prepared.card.max_request_tokens)
    assert kv.k_rows.is_contiguous()
    assert not bool(kv.k.any())
    assert kv.seals is None or not bool(kv.seals.tags.any())


@pytest.mark.parametrize(
    ("where", "name", "message"),
    [
        ("worker.model_engine", "load_model", r"^model m: the GPU's memory is too small for its weights$"),
        (KvPool, "allocate", r"^kv_tokens: .* no room for a KV pool of 64 tokens \(0\.00 GiB\)$"),
        (Decoder, "prepare", r"^kv_tokens, step_tokens, max_sequences: .* no room for steps of 2 tokens and 1 sequences$"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(
    settings: Callable[..., WorkerSettings], monkeypatch: pytest.MonkeyPatch, where: object, name: str, message: str
) -> None:
    """The error says which settings to change; also where the end of a recording hides it behind an error of its own."""

    def full(*_: object, **options: object) -> None:
        raise torch.OutOfMemoryError(TOO_MUCH)

    def hidden(*_: object, **options: object) -> None:
        try:
            full()
        finally:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    for broken in (full, hidden):
        with monkeypatch.context() as patch:
            if isinstance(where, str):
                patch.setattr(f"{where}.{name}", broken)
            else:
                patch.setattr(where, name, broken)
            with pytest.raises(SettingsError, match=message):
                preparation(settings())()


def test_other_errors_keep_their_names(
    settings: Callable[..., WorkerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has nothing to do with memory isn't taken for it."""

    def broken(*_: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Decoder, "prepare", broken)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        preparation(settings())()
