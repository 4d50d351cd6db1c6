"""Fixtures that tests of several packages share."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from sluicegate import model_store
from sluicegate.valkey import embedded_valkey


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
