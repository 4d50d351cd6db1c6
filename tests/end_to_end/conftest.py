"""Whole stacks: real processes, a real Valkey, the real model."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

COMMAND = [sys.executable, "-m", "sluicegate"]


@dataclass
class Stack:
    """A running stack, as its stack.json describes it."""

    data: Path
    info: dict
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.info["url"]

    @property
    def key(self) -> str:
        return self.info["key"]

    @property
    def model(self) -> str:
        return self.info["model"]

    def client(self, key: str | None = None) -> openai.OpenAI:
        """One client for each key, closed with the stack: a client that is only forgotten leaves its sockets to the collector."""
        key = key or self.key
        if key not in self.clients:
            self.clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=100)
        return self.clients[key]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        headers = {"Authorization": f"Bearer {self.info['admin_key']}"}
        request = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            for line in response.read().decode().splitlines():
                if line.startswith(name) and all(f'{label}="{value}"' in line for label, value in labels.items()):
                    total += float(line.rpartition(" ")[2])
        return total

    def reread(self) -> dict:
        """The description as it is now: processes may have been replaced."""
        self.info = json.loads((self.data / "stack.json").read_text())
        return self.info

    def status(self, path: str) -> int:
        """The status of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def pid_of_busy_worker(self) -> int:
        """The process id of a worker that runs something."""
        busy: list[int] = []

        def is_busy() -> bool:
            request = urllib.request.Request(
                f"{self.url}/admin/v1/workers", headers={"Authorization": f"Bearer {self.info['admin_key']}"}
            )
            with urllib.request.urlopen(request, timeout=10) as response:
                workers = json.loads(response.read())["data"]
            busy[:] = [worker["pid"] for worker in workers if worker["running_sequences"]]
            return bool(busy)

        self.wait_for(is_busy, 10)
        return busy[0]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Seconds until the condition held."""
        started_s = time.monotonic()
        while not condition():
            assert time.monotonic() - started_s < timeout_s, "the condition did not come to hold in time"
            time.sleep(0.02)
        return time.monotonic() - started_s

    def run(self, *arguments: str, check: bool = True) -> str:
        """A sub-command against this stack; returns what it printed."""
        result = subprocess.run(
            [*COMMAND, *arguments, "--data", str(self.data)], capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or result.returncode == 0, result.stderr
        return result.stdout


def start(data: Path, *flags: str) -> Stack:
    """`sluicegate up --detach` in a data folder."""
    command = [*COMMAND, "up", "--detach", "--port", "0", "--data", str(data), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return Stack(data, json.loads((data / "stack.json").read_text()))


def stop(stack: Stack) -> None:
    """`sluicegate down`."""
    for client in stack.clients.values():
        client.close()
    result = subprocess.run(
        [*COMMAND, "down", "--data", str(stack.data)], capture_output=True, timeout=100, check=False
    )
    assert result.returncode == 0


@pytest.fixture(scope="session")
def start_stack() -> Callable[..., Iterator[Stack]]:
    """For fixtures that keep a stack of their own: starts one, yields it, stops it."""

    def run(data: Path, *flags: str) -> Iterator[Stack]:
        running = start(data, *flags)
        yield running
        stop(running)

    return run


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Stack]:
    """One stack for all tests that leave it as they found it."""
    running = start(tmp_path_factory.mktemp("stack"))
    yield running
    stop(running)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Stack]:
    """A stack with two workers, for tests that kill them: the supervisor starts them again."""
    running = start(tmp_path_factory.mktemp("fleet"), "--workers", "2", "--kv-tokens", "4096")
    yield running
    stop(running)


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Starts stacks of the test's own, and stops those that still run."""
    started: list[Stack] = []

    def make(name: str = "own", *flags: str) -> Stack:
        started.append(start(tmp_path / name, *flags))
        return started[-1]

    yield make
    for running in started:
        stop(running)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], None]:
    """Waits for the state of other processes."""

    def until(condition: Callable[[], bool], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, "the condition did not come to hold in time"
            time.sleep(0.1)

    return until
