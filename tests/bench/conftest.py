"""Processes of the scripted engine."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.process import EngineProcess

SCRIPT = Path(__file__).with_name("scripted_engine.py")


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[str], EngineProcess]]:
    """Starts the scripted engine in a mode."""
    processes: list[EngineProcess] = []

    def start(mode: str = "works") -> EngineProcess:
        process = EngineProcess([sys.executable, str(SCRIPT), mode], {}, tmp_path / f"{mode}.log")
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def load_request() -> dict[str, Any]:
    """What a parent asks first."""
    return {"op": "load", "model": "m", "threads": 2, "max_context": 64, "max_streams": 4, "options": {}}
