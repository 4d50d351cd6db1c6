"""What a worker does with a backend that its model can't run on."""

import pytest

from kernels.errors import KernelError
from protocol.ids import ModelName
from worker.model_engine import preparation
from worker.settings import WorkerSettings


def test_a_worker_told_to_use_the_gpu_is_refused(tmp_path):
    """Kernels for GPUs exist, the model runner doesn't use them: one clear error before anything is loaded."""
    settings = WorkerSettings(
        redis_url="redis://127.0.0.1:1", model_path=tmp_path, model_name=ModelName("m"),
        job_signing_key=b"k" * 32, namespace_secret=b"n" * 32, kernels="gpu",
    )  # fmt: skip
    with pytest.raises(KernelError, match="models don't run on GPUs yet"):
        preparation(settings)
