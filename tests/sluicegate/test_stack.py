"""`sluicegate up` and `down` as processes, over stand-ins for gateway and workers."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sluicegate.child import start_time


def _pids(data: Path) -> list[int]:
    pids = json.loads((data / "stack.json").read_text())["pids"]
    return [pids["redis"], *pids["gateway"], *pids["workers"]]


def _living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if start_time(pid) is not None]


@pytest.fixture
def bystander():
    """A process that no stack started."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate()


def test_the_start_ends_with_what_a_user_needs(up: Callable, data: Path) -> None:
    """Base URL, tenant, key and a ready curl line that streams."""
    process = up("--name", "tiny-1")
    stack = json.loads((data / "stack.json").read_text())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert f"Base URL  {stack['url']}/v1" in output
    assert f"Tenant    {stack['tenant']}" in output
    assert f"API key   {stack['key']}" in output
    assert f"curl -N {stack['url']}/v1/chat/completions -H 'Authorization: Bearer {stack['key']}'" in output
    body = json.loads(output.partition("-d '")[2].partition("'\n")[0])
    assert ("tiny-1", True) == (body["model"], body["stream"])
    # A small model at the API's default temperature rambles on to the end of its context.
    assert (0, True) == (body["temperature"], 0 < body["max_tokens"] < 1000)
    chat = shlex.split(output.partition("another terminal: ")[2].partition("\n")[0])
    assert "sluicegate" == Path(chat[0]).name
    assert ["chat", "--data", str(data)] == chat[1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains_in_order(up: Callable, data: Path, stand_ins, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end gateway, worker and Valkey in order; the exit code is 0 and nothing is left."""
    process = up()
    pids = _pids(data)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert 0 == process.returncode
    assert output.endswith("Stopped.\n")
    ends = [note for note in stand_ins.notes() if "started" not in note]
    assert ["gateway told to end", "gateway ended", "worker told to end", "worker ended"] == ends
    assert [] == _living(pids)
    assert not (data / "stack.json").exists()


def test_a_second_signal_is_faster(up: Callable, data: Path, stand_ins, eventually, monkeypatch) -> None:
    """Ctrl-C again doesn't wait for a gateway that won't end, and still leaves nothing."""
    monkeypatch.setenv("STAND_IN_STUBBORN", "gateway")
    process = up("--drain-grace", "3600")
    pids = _pids(data)
    process.send_signal(signal.SIGINT)
    eventually(lambda: "gateway told to end" in stand_ins.notes(), "the gateway was told to end")
    assert "worker told to end" not in stand_ins.notes()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert 0 == process.returncode
    assert [] == _living(pids)


def test_a_signal_during_the_start_leaves_nothing(up: Callable, data: Path, stand_ins, eventually, monkeypatch) -> None:
    """Ctrl-C before the stack is ready ends what has started, without a traceback."""
    monkeypatch.setenv("STAND_IN_UNREADY", "1")
    process = up(is_ready=False)
    eventually(lambda: 2 == len(stand_ins.notes()), "both were started")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert (0, "Stopped before the stack was ready.") == (process.returncode, output.splitlines()[-1])
    assert 2 == sum(note.endswith("ended") for note in stand_ins.notes())
    assert "Traceback" not in output


def test_a_killed_supervisor_leaves_no_process(up: Callable, data: Path, sluicegate, eventually) -> None:
    """kill -9 of the supervisor ends all; `down` then tidies up, and `up` works again."""
    process = up("--workers", "2")
    pids = _pids(data)
    process.kill()
    process.wait()
    eventually(lambda: [] == _living(pids), "all processes have ended")
    result = sluicegate("down", "--data", str(data))
    assert (0, f"Stopped the stack in {data}.\n") == (result.returncode, result.stdout)
    assert not (data / "stack.json").exists()
    up()
    assert 3 == len(_living(_pids(data)))


def test_up_after_a_killed_supervisor_needs_no_down(up: Callable, data: Path, eventually) -> None:
    """A stack.json that nobody stands behind doesn't stop the next start."""
    process = up()
    pids = _pids(data)
    process.kill()
    process.wait()
    eventually(lambda: [] == _living(pids), "all processes have ended")
    stale = (data / "stack.json").read_text()
    second = up(is_ready=False)
    eventually(lambda: (data / "stack.json").read_text() != stale, "the stack is up")
    assert second.pid == json.loads((data / "stack.json").read_text())["supervisor"]


def test_down_stops_a_running_stack(up: Callable, data: Path, sluicegate) -> None:
    """`down` returns when everything has ended, and a second one finds nothing."""
    process = up()
    pids = _pids(data)
    result = sluicegate("down", "--data", str(data))
    assert (0, f"Stopped the stack in {data}.\n") == (result.returncode, result.stdout)
    assert [] == _living(pids)
    assert 0 == process.wait(timeout=10)
    result = sluicegate("down", "--data", str(data))
    assert (0, f"No stack is running in {data}.\n") == (result.returncode, result.stdout)


def test_down_spares_processes_that_are_not_ours(data: Path, sluicegate, bystander) -> None:
    """A pid that was reused since isn't signalled."""
    pid, other = bystander.pid, start_time(bystander.pid) - 1
    data.mkdir()
    stack = {
        "supervisor": pid,
        "pids": {"redis": pid, "gateway": [pid], "workers": [pid]},
        "started": {str(pid): other},
    }
    (data / "stack.json").write_text(json.dumps(stack))
    assert 0 == sluicegate("down", "--data", str(data)).returncode
    assert bystander.poll() is None
    assert not (data / "stack.json").exists()


def test_down_spares_a_process_without_a_start_time(data: Path, sluicegate, bystander) -> None:
    """A stack.json that doesn't say when a process started proves nothing about it."""
    data.mkdir()
    (data / "stack.json").write_text(json.dumps({"supervisor": bystander.pid, "pids": {"redis": bystander.pid}}))
    assert 0 == sluicegate("down", "--data", str(data)).returncode
    assert bystander.poll() is None


def test_a_data_folder_has_one_stack(up: Callable, data: Path, sluicegate, model_file: Path) -> None:
    """A second `up` says how to stop the first, which goes on."""
    up()
    before = (data / "stack.json").read_text()
    result = sluicegate("up", "--port", "0", "--data", str(data), "--model", str(model_file))
    assert 1 == result.returncode
    assert (
        f"sluicegate: a stack is already running in {data}; stop it with: sluicegate down --data {data}\n"
        == result.stderr
    )
    assert before == (data / "stack.json").read_text()
    assert 3 == len(_living(_pids(data)))


def test_a_starting_stack_keeps_another_out(
    up: Callable, data: Path, sluicegate, stand_ins, eventually, model_file, monkeypatch
) -> None:
    """Before stack.json is written a lock guards the folder."""
    monkeypatch.setenv("STAND_IN_UNREADY", "1")
    up(is_ready=False)
    eventually(lambda: 2 == len(stand_ins.notes()), "the first is starting")
    result = sluicegate("up", "--port", "0", "--data", str(data), "--model", str(model_file))
    assert (1, f"sluicegate: a stack is already starting or running in {data}\n") == (result.returncode, result.stderr)


def test_two_stacks_run_side_by_side(up: Callable, tmp_path: Path, sluicegate) -> None:
    """Two data folders, two stacks; stopping one leaves the other."""
    one, two = tmp_path / "one", tmp_path / "two"
    up(folder=one)
    up(folder=two)
    first, second = (json.loads((folder / "stack.json").read_text()) for folder in (one, two))
    for field in ("url", "key", "admin_key", "redis_url", "supervisor"):
        assert first[field] != second[field]
    assert 0 == sluicegate("down", "--data", str(one)).returncode
    assert 3 == len(_living(_pids(two)))


def test_a_taken_port_is_named(data: Path, sluicegate, model_file: Path) -> None:
    """A port that somebody listens on stops the start before anything runs."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = sluicegate("up", "--port", str(port), "--data", str(data), "--model", str(model_file))
    assert (1, "") == (result.returncode, result.stdout)
    assert f"sluicegate: port {port} is in use; choose another with --port, or --port 0 for any\n" == result.stderr


def test_a_failed_start_says_why_and_leaves_nothing(up: Callable, data: Path, stand_ins, monkeypatch) -> None:
    """The last line is the reason in the child's own words, and the exit code 1."""
    monkeypatch.setenv("STAND_IN_BROKEN", "worker")
    process = up(is_ready=False)
    output, _ = process.communicate(timeout=30)
    assert 1 == process.returncode
    assert "worker-0 did not start" in output.splitlines()[-1]
    assert "the worker has no luck" in output.splitlines()[-1]
    assert stand_ins.notes().count("gateway started") == stand_ins.notes().count("gateway ended")
    assert not (data / "stack.json").exists()


def test_the_end_of_valkey_ends_the_command(up: Callable, data: Path) -> None:
    """When the embedded Valkey dies the rest is stopped and the exit code is 1."""
    process = up()
    pids = _pids(data)
    os.kill(pids[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert (1, []) == (process.returncode, _living(pids))
    assert f"sluicegate: the stack failed; its logs are in {data / 'logs'}" == output.splitlines()[-1]


def test_no_secret_is_in_a_command_line(up: Callable, data: Path) -> None:
    """Keys and passwords travel by environment and files: anybody may list processes."""
    up()
    stack = json.loads((data / "stack.json").read_text())
    password = stack["redis_url"].partition("://:")[2].partition("@")[0]
    for pid in _pids(data):
        arguments = Path(f"/proc/{pid}/cmdline").read_text()
        for secret in (stack["key"], stack["admin_key"], password):
            assert secret not in arguments
