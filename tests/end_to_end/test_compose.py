"""docker-compose.yml without a container engine: every service's command as a local process with its environment."""

import os
import re
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml

from sluicegate.valkey import _binary, free_port

ROOT = Path(__file__).parents[2]
START_S = 120.0  # five processes, three of which load torch or a model, on however busy a machine
GIVEN = {"SLUICEGATE_MASTER_KEY": "ab" * 32, "SLUICEGATE_REDIS_PASSWORD": secrets.token_hex(16)}
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def _substituted(text: str) -> str:
    """Compose's ${NAME}, ${NAME:-default} and ${NAME:?what it must be}."""

    def value(match: re.Match) -> str:
        name, kind, default = match.groups()
        assert name in GIVEN or kind == "-", f"{name} is neither given nor has a default"
        return GIVEN.get(name, default)

    return _VARIABLE.sub(value, text)


class Composed:
    """The file's services on this machine: host names, ports and folders of the containers become local ones."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.services = yaml.safe_load(_substituted((ROOT / "docker-compose.yml").read_text()))["services"]
        self.processes: dict[str, subprocess.Popen] = {}
        self.folder = folder
        self.home = home
        self.redis_port, self.port = free_port(), free_port()

    def start(self, service: str, name: str = "") -> subprocess.Popen:
        """Run a service's command; `name` tells several of one service apart."""
        described = self.services[service]
        command = [self._local(part) for part in described["command"]]
        if command[0] == "valkey-server":
            command = [str(_binary()), *command[1:], "--port", str(self.redis_port), "--bind", "127.0.0.1"]
        else:
            command = [sys.executable, "-m", *command]
        environment = {key: self._local(str(value)) for key, value in described.get("environment", {}).items()}
        folder = self.folder / service
        folder.mkdir(exist_ok=True)
        with (folder / f"{name or service}.log").open("wb") as log:
            # Nothing of the tester's own settings: the file must be enough.
            process = subprocess.Popen(
                command, env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), **environment},
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes[name or service] = process
        return process

    def run(self, service: str, *arguments: str) -> str:
        """What `docker compose exec SERVICE sluicegate ...` prints."""
        environment = {k: self._local(str(v)) for k, v in self.services[service]["environment"].items()}
        return subprocess.run(
            [sys.executable, "-m", "sluicegate", *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
            check=True, timeout=60,
        ).stdout.strip()  # fmt: skip

    def _local(self, text: str) -> str:
        text = text.replace("@redis:6379", f"@127.0.0.1:{self.redis_port}")
        replaced = {
            "0.0.0.0": "127.0.0.1",
            "8080": str(self.port),
            "/data": str(self.folder / "data"),
            "/models": str(self.home),
        }
        return replaced.get(text, text)


@pytest.fixture
def composed(tmp_path: Path, smollm2_path: Path) -> Iterator[Composed]:
    made = Composed(tmp_path, smollm2_path.parents[1])
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def _is_ready(composed: Composed) -> bool:
    assert all(process.poll() is None for process in composed.processes.values())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{composed.port}/health/ready", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _client(composed: Composed, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{composed.port}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.mark.timeout(400)
def test_the_composed_stack_answers(composed: Composed, eventually) -> None:
    """Redis, gateway, two workers of the model and a synthetic one, started in the file's order; all end with 0 at SIGTERM."""
    composed.start("redis")
    composed.start("gateway")
    composed.start("worker", "worker-1")
    composed.start("worker", "worker-2")
    composed.start("synthetic")
    eventually(lambda: _is_ready(composed), START_S)
    composed.run("gateway", "tenant", "create", "acme")
    key = composed.run("gateway", "key", "create", "acme").splitlines()[-1]
    with _client(composed, key) as client:
        eventually(
            lambda: {"smollm2-135m-instruct", "synthetic"} == {model.id for model in client.models.list().data}, START_S
        )
        for model in ("smollm2-135m-instruct", "synthetic"):
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
            )
            assert answer.choices[0].message.content
    for name in ("gateway", "worker-1", "worker-2", "synthetic", "redis"):
        composed.processes[name].terminate()
        assert 0 == composed.processes[name].wait(45), name


def test_every_service_is_started_by_the_test_above() -> None:
    """A service that is added to the file has to be added to the test."""
    services = yaml.safe_load(_substituted((ROOT / "docker-compose.yml").read_text()))["services"]
    assert {"redis", "gateway", "worker", "synthetic"} == set(services)


def test_the_file_asks_for_its_secrets() -> None:
    """No secret has a default."""
    text = (ROOT / "docker-compose.yml").read_text()
    for name in ("SLUICEGATE_MASTER_KEY", "SLUICEGATE_REDIS_PASSWORD"):
        assert {"?"} == {match[2] for match in _VARIABLE.finditer(text) if match[1] == name}


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_the_images_start_what_the_file_starts(target: str) -> None:
    """Build targets of the file are stages of the Dockerfile, and the wheel has all that their commands import."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    services = yaml.safe_load(_substituted((ROOT / "docker-compose.yml").read_text()))["services"]
    assert target == services[target]["build"]["target"]
    assert re.search(rf"^FROM service AS {target}$", dockerfile, re.MULTILINE)
