"""A process that belongs to a stack: it has a log, gets signals from its supervisor only, and doesn't outlive it."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child:
    """A started process."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "Child":
        """Start a command with its output appended to a log file."""
        parent = os.getpid()

        def before_exec() -> None:
            # If the supervisor is killed, the kernel ends its children. It may have died before this line.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            os.fchmod(output.fileno(), 0o600)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                # A session of its own: Ctrl-C in the terminal reaches the supervisor, which ends its children in order.
                start_new_session=True,
                preexec_fn=before_exec,
            )
        return cls(name, log, process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Until it ends; returns its exit code, negative for a signal."""
        return await self._process.wait()

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after the grace time."""
        if self.is_running:
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def last_words(self) -> str:
        """The last line of its log that says something."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")[:500]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: together with its pid this names it for good. None if there's none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything; the 20th field after it is the start time, and the first the state.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
