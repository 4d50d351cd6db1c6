"""Settings from flags, environment, file and defaults: one name, one order, and nothing that is misspelt goes unnoticed."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from sluicegate.command import make_parser
from sluicegate.config_page import tables
from sluicegate.configuration import COMMANDS, ENVIRONMENT, complete, key_of, leaves, settings
from sluicegate.errors import CommandError

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside."""
    for name in list(os.environ):
        if name.startswith("SLUICEGATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLUICEGATE_CONFIG", "")  # put back what a test sets


def _parsed(*arguments: str):
    parsed = make_parser().parse_args(arguments)
    complete(make_parser, list(arguments), parsed)
    return parsed


def _file(folder: Path, text: str) -> str:
    path = folder / "sluicegate.toml"
    path.write_text(text)
    return str(path)


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag wins over the environment, which wins over the file, which wins over the default."""
    path = _file(tmp_path, 'port = 1001\nmax-choices = 3\nhost = "file"\n')
    assert 8080 == _parsed("gateway").port
    parsed = _parsed("gateway", "--config", path)
    assert (1001, 3, "file") == (parsed.port, parsed.max_choices, parsed.host)
    monkeypatch.setenv("SLUICEGATE_PORT", "1002")
    parsed = _parsed("gateway", "--config", path)
    assert (1002, 3) == (parsed.port, parsed.max_choices)
    assert 1003 == _parsed("gateway", "--config", path, "--port", "1003").port
    assert 8080 == _parsed("gateway", "--config", path, "--port", "8080").port


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the processes of a stack."""
    monkeypatch.setenv("SLUICEGATE_CONFIG", _file(tmp_path, "kv-tokens = 4096"))
    assert 4096 == _parsed("worker").kv_tokens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "there is no setting 'prot'; did you mean 'port'?"), ("max_body_bytes = 2048", "there is no setting 'max_body_bytes'"),
        ("[gateway]\nport = 1", "there is no setting 'gateway'"), ("port = 99999", "port: must be 0 to 65535, got 99999"), ('port = "x"', "port: expected a whole number"),
        ("port = true", "port: expected a number or a text"), ("port = [1]", "port: expected a number or a text"), ("slow-reader = 0", "slow-reader: must be more than 0 seconds"),
        ('kv-dtype = "int3"', "kv-dtype: expected one of bf16, fp16, fp8, got 'int3'"), ("page-size = 3", "page-size: expected one of 1, 2, 4"), ("port = ", "is not valid TOML"),
        ('admin-key = "12345678"', "admin-key is a secret; it belongs in the environment"), ('master-key = "00"', "master-key is a secret"),
        ("detach = true", "there is no setting 'detach'"), ("workers = 0", "workers: must be 1 to 64, got 0"), ('integrity = "x"', "integrity: expected one of off, lease, seal, full, got 'x'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_bad_files(command: str, text: str, message: str, tmp_path: Path) -> None:
    """What is unknown or wrong stops the start with its name, whichever process it concerns; a secret isn't shown."""
    path = _file(tmp_path, text)
    with pytest.raises(CommandError) as error:
        _parsed(command, "--config", path)
    assert str(error.value).startswith(path)
    assert message in str(error.value)
    assert "12345678" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    """A file that isn't there was meant to be."""
    with pytest.raises(CommandError, match=r"nowhere\.toml: cannot be read"):
        _parsed("gateway", "--config", str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLUICEGATE_PROT", "1", "SLUICEGATE_PROT: there is no such setting; did you mean 'SLUICEGATE_PORT'?"), ("SLUICEGATE_PORT", "x", "SLUICEGATE_PORT: expected a whole number"),
        ("SLUICEGATE_BODY_TIMEOUT", "0", "SLUICEGATE_BODY_TIMEOUT: must be more than 0 seconds"), ("SLUICEGATE_ZZZZZZZZZZ", "1", "SLUICEGATE_ZZZZZZZZZZ: there is no such setting"),
    ],
)  # fmt: skip
def test_bad_variables(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is held to the same."""
    monkeypatch.setenv(name, value)
    with pytest.raises(CommandError) as error:
        _parsed("gateway")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("false", False), ("False", False), ("0", False)]
)
def test_switches_in_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag without a value can be off, too; what is neither is refused."""
    monkeypatch.setenv("SLUICEGATE_ALLOW_FAULT_INJECTION", text)
    assert _parsed("worker").allow_fault_injection is value
    monkeypatch.setenv("SLUICEGATE_ALLOW_FAULT_INJECTION", "off?")
    with pytest.raises(CommandError, match="expected true or false, got 'off\\?'"):
        _parsed("worker")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ('"false"', False), ("0", False)])
def test_switches_in_a_file(text: str, value: bool, tmp_path: Path) -> None:
    """TOML's own words, and what the environment takes."""
    path = _file(tmp_path, f"allow-fault-injection = {text}")
    assert _parsed("worker", "--config", path).allow_fault_injection is value
    path = _file(tmp_path, "allow-fault-injection = 2")
    with pytest.raises(CommandError, match="allow-fault-injection: expected true or false, got '2'"):
        _parsed("worker", "--config", path)


def test_bad_ones_stop_the_start() -> None:
    """One line, exit code 1."""
    environment = {**os.environ, "SLUICEGATE_PROT": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "sluicegate", "gateway"], env=environment, capture_output=True, text=True, check=False
    )
    assert (1, 1, "sluicegate: SLUICEGATE_PROT") == (result.returncode, result.stderr.count("\n"), result.stderr[:27])


def test_show_has_every_setting_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values with their sources; keys and passwords are not among them."""
    from sluicegate.command import main

    for name in ("SLUICEGATE_ADMIN_KEY", "SLUICEGATE_MASTER_KEY", "SLUICEGATE_API_KEY"):
        monkeypatch.setenv(name, "canary-" + name)
    monkeypatch.setenv("SLUICEGATE_REDIS_URL", "redis://user:canary-password@host:6379/0")
    path = _file(tmp_path, "port = 1001")
    for command in COMMANDS:
        assert 0 == main(["config", "show", command, "--config", path])
        output = capsys.readouterr().out
        keys = {line.partition(" =")[0] for line in output.splitlines()}
        assert {key_of(action) for action in settings(leaves(make_parser())[command])} <= keys
        assert {variable.key for variable in ENVIRONMENT} <= keys
        assert "canary" not in output
    assert 0 == main(["config", "show", "gateway", "--config", path])
    output = capsys.readouterr().out
    assert f"port = 1001  # {path}: port" in output
    assert 0 == main(["config", "show", "worker"])
    assert "allow-fault-injection = false  # default\n" in capsys.readouterr().out
    assert 'redis-url = "redis://user:***@host:6379/0"  # SLUICEGATE_REDIS_URL' in output


def test_the_page_is_complete() -> None:
    """docs/configuration.md holds the tables that the code makes."""
    assert tables() in DOCUMENT.read_text(encoding="utf-8")


def test_a_gateway_takes_its_file(tmp_path: Path, valkey_url: str) -> None:
    """A process started with a file listens where it says, and has its metrics on a port of their own without a key."""
    port, metrics_port = _free_ports()
    path = _file(tmp_path, f"port = {port}\nmetrics-port = {metrics_port}\nmax-body-bytes = 2048\n")
    environment = {
        **os.environ,
        "SLUICEGATE_REDIS_URL": valkey_url,
        "SLUICEGATE_DATA": str(tmp_path / "data"),
        "SLUICEGATE_CONFIG": path,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "sluicegate", "gateway"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        assert 200 == _status(f"http://127.0.0.1:{port}/health/live")
        assert (401, 200) == (
            _status(f"http://127.0.0.1:{port}/metrics"),
            _status(f"http://127.0.0.1:{metrics_port}/metrics"),
        )
        assert 404 == _status(f"http://127.0.0.1:{metrics_port}/v1/models")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=10) as response:
            assert "3.1.0" == json.load(response)["openapi"]
    finally:
        process.terminate()
        process.wait(20)


def _status(url: str) -> int:
    end_s = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.1)


def _free_ports() -> tuple[int, int]:
    from sluicegate.valkey import free_port

    return free_port("127.0.0.1"), free_port("127.0.0.1")
