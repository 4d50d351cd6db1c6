"""Fixtures that tests of several packages share."""

from pathlib import Path

import pytest

from sluicegate import model_store


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), fetched once into the home folder."""
    return model_store.pull(model_store.DEFAULT_MODEL)
