"""Processes of a stack: their signals, logs and lives."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sluicegate.child import Child, start_time

STUBBORN = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True)); print('up', flush=True)\nwhile True: signal.pause()"
PARENT = """
import asyncio, os, pathlib, sys
from sluicegate.child import Child

async def main():
    child = await Child.start("child", sys.argv[2:], pathlib.Path(sys.argv[1]), os.environ)
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


async def _start(log: Path, *command: str) -> Child:
    return await Child.start("child", [sys.executable, "-c", *command], log, os.environ)


def _has_ended(pid: int, timeout_s: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


async def test_output_goes_to_a_private_log(tmp_path: Path) -> None:
    """Standard output and error are appended to a file with mode 0600."""
    log = tmp_path / "logs" / "child.log"
    for word in ("one", "two"):
        child = await _start(log, f"import sys; print('{word}', file=sys.stderr)")
        assert 0 == await child.wait()
    assert "one\ntwo\n" == log.read_text()
    assert 0o600 == log.stat().st_mode & 0o777


async def test_the_last_words_are_a_line_that_says_something(tmp_path: Path) -> None:
    """Empty lines at the end are passed over."""
    child = await _start(tmp_path / "log", "print('first'); print('because'); print(' '); print()")
    await child.wait()
    assert "because" == child.last_words()


async def test_a_silent_child_has_no_last_words(tmp_path: Path) -> None:
    """An empty log, or none, is no error."""
    child = await _start(tmp_path / "log", "pass")
    await child.wait()
    assert "" == child.last_words()
    (tmp_path / "log").unlink()
    assert "" == child.last_words()


async def test_a_child_is_out_of_reach_of_the_terminal(tmp_path: Path) -> None:
    """It leads a session of its own, so that Ctrl-C reaches the supervisor only."""
    child = await _start(tmp_path / "log", "import signal; signal.pause()")
    assert child.pid == os.getsid(child.pid) == os.getpgid(child.pid)
    await child.end(5)
    assert -signal.SIGTERM == await child.wait()
    assert not child.is_running


async def test_a_stubborn_child_is_killed(tmp_path: Path, eventually) -> None:
    """SIGTERM first, SIGKILL when the grace time is over."""
    log = tmp_path / "log"
    child = await _start(log, STUBBORN)
    eventually(lambda: log.read_text() == "up\n", "the child is up")
    await child.end(0.2)
    assert -signal.SIGKILL == await child.wait()
    assert "up\nno\n" == log.read_text()


async def test_ending_twice_is_harmless(tmp_path: Path) -> None:
    """A child that has ended is not signalled again."""
    child = await _start(tmp_path / "log", "pass")
    await child.wait()
    await child.end(1)
    await child.end(1)
    assert 0 == await child.wait()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-c", "import signal; signal.pause()"], id="python"),
        pytest.param(["/bin/sleep", "60"], id="another-program"),
    ],
)
def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path, command: Sequence[str]) -> None:
    """kill -9 of the supervisor ends its children, through the kernel."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log"), *command], stdout=subprocess.PIPE, text=True
    )
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert not _has_ended(child, 0)
    parent.kill()
    parent.wait()
    assert _has_ended(child, 10)


def test_a_start_time_names_a_process() -> None:
    """It stays the same while the process lives, and there is none afterwards, not even for a zombie."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = start_time(process.pid)
    assert first is not None
    assert first == start_time(process.pid)
    assert first >= start_time(os.getpid())
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(process.pid) is None
    process.wait()
    assert start_time(process.pid) is None


def test_a_start_time_is_read_past_an_odd_name(tmp_path: Path) -> None:
    """Blanks and parentheses in a program's name don't shift the fields."""
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "60"])
    try:
        assert start_time(process.pid) >= start_time(os.getpid())
    finally:
        process.kill()
        process.wait()
