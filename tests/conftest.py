"""Fixtures that tests of several packages share."""

import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import redis

from sluicegate import model_store
from sluicegate.valkey import embedded_valkey

# Triton decides when a kernel is defined whether it's interpreted. Tests have no GPU, and whichever of them imports a kernel first must
# not decide for the others.
os.environ["TRITON_INTERPRET"] = "1"

# Several test processes share a machine's cores. A pool of threads for each of them, and for each process that they start, would mostly
# wait for the others; what several threads compute has tests of its own.
for variable in ("SLUICEGATE_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Tests of these folders start processes and wait for them; the others compute. Both kinds take turns, so that cores are neither idle nor
# fought over; within a kind the folders with long tests come first.
WAITING = ("end_to_end", "chaos", "bench", "gateway", "sluicegate")
COMPUTING_FIRST = ("kernels", "worker")
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait and files that compute by turns, evenly from the first to the last; tests of a file as collected."""
    files = list(dict.fromkeys(item.path for item in items))
    folder = {path: path.relative_to(ROOT).parts[0] for path in files}
    order: dict[Path, float] = {}
    for is_waiting, first in ((True, WAITING), (False, COMPUTING_FIRST)):
        kind = [path for path in files if (folder[path] in WAITING) == is_waiting]
        kind.sort(key=lambda path: first.index(folder[path]) if folder[path] in first else len(first))
        order |= {path: (place + 0.5) / len(kind) for place, path in enumerate(kind)}
    items.sort(key=lambda item: order[item.path])


@pytest.fixture(scope="module")
def ordered_products() -> Iterator[None]:
    """Tile products of Triton's interpreter, rounded once from float64.

    The interpreter leaves them to a library that adds in another order for another number of rows, which a tensor core doesn't; with
    that order out of the way, a bit that differs between two batches comes from the kernels.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        with np.errstate(all="ignore"):
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The file beside this one: tiny random models of each architecture."""
    spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).with_name("tiny_models.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), fetched once into the home folder."""
    return model_store.pull(model_store.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey on a free loopback port, ended with the tests."""
    server = embedded_valkey(tmp_path_factory.mktemp("valkey"))
    process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
    with redis.Redis.from_url(server.url) as client:
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)
    yield server.url
    process.terminate()
    process.wait(10)
