"""Data folders, the command as a process, a Valkey, and stacks whose gateway and workers are small scripts."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from sluicegate.valkey import embedded_valkey

WAIT_S = 30.0

# What stands in for `python -m sluicegate gateway|worker`: ready when there's a worker, it notes what happens to it.
STAND_IN = """\
    #!{python}
    import http.server, os, signal, sys
    kind, flags = sys.argv[3], sys.argv[4:]
    journal = os.environ["STAND_IN_JOURNAL"]

    def note(text):
        with open(journal, "a") as file:
            file.write(f"{{kind}} {{text}}\\n")

    def on_term(*_):
        note("told to end")
        if kind not in os.environ.get("STAND_IN_STUBBORN", ""):
            note("ended")
            os._exit(0)

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            has_worker = os.path.exists(journal) and "worker " in open(journal).read()
            self.send_response(200 if has_worker and "STAND_IN_UNREADY" not in os.environ else 503)
            self.end_headers()

        def log_message(self, *_):
            pass

    signal.signal(signal.SIGTERM, on_term)
    if kind in os.environ.get("STAND_IN_BROKEN", ""):
        sys.exit(f"sluicegate: the {{kind}} has no luck")
    note("started")
    if kind == "gateway":
        http.server.HTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Ready).serve_forever()
    while True:
        signal.pause()
"""

# `sluicegate ARGUMENTS`, but for what it starts.
COMMAND_WITH_STAND_INS = (
    "import sys; from sluicegate.command import main; sys.executable = sys.argv[1]; sys.exit(main(sys.argv[2:]))"
)


def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for the state of another process, of which nobody tells."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


@dataclass(frozen=True)
class StandIns:
    """`executable` is started in the place of Python; `journal` holds what the processes noted, in order."""

    executable: Path
    journal: Path

    def notes(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of whoever runs the tests, and nothing of theirs is touched."""
    for name in list(os.environ):
        if name.startswith("SLUICEGATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLUICEGATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder that doesn't exist yet."""
    return tmp_path / "data"


@pytest.fixture
def sluicegate() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """The command, run to its end."""

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "sluicegate", *arguments],
            env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey as `up` starts it, empty."""
    server = embedded_valkey(tmp_path_factory.mktemp("valkey"))
    process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            with redis.Redis.from_url(server.url) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    until(answers, "Valkey answers")
    yield server.url
    process.terminate()
    process.wait()


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Small scripts for gateway and worker. STAND_IN_STUBBORN and _BROKEN name those that don't end, or don't start."""
    executable = tmp_path / "stand_in"
    executable.write_text(textwrap.dedent(STAND_IN).format(python=sys.executable))
    executable.chmod(0o755)
    journal = tmp_path / "journal"
    monkeypatch.setenv("STAND_IN_JOURNAL", str(journal))
    return StandIns(executable, journal)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A file to name as a model; stand-ins don't read it."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"")
    return path


@pytest.fixture
def up(stand_ins: StandIns, model_file: Path, data: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `sluicegate up` with stand-ins in the foreground; `is_ready=False` doesn't wait for stack.json."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, folder: Path = data, is_ready: bool = True) -> "subprocess.Popen[str]":
        arguments = ["up", "--port", "0", "--data", str(folder), "--model", str(model_file), *flags]
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND_WITH_STAND_INS, str(stand_ins.executable), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        if is_ready:
            until(lambda: (folder / "stack.json").exists() or process.poll() is not None, "the stack is up")
            assert process.poll() is None, process.communicate()[0]
        return process

    yield start
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`until` for tests."""
    return until
