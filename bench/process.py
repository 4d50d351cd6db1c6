"""Our side of the protocol: an engine's process, asked one thing at a time. `engines/serve.py` is the other side."""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUIT_S = 10.0
LAST_LINES = 3


class EngineError(Exception):
    """An engine's process failed, died, or took too long."""


class EngineProcess:
    """Started at once; `close` ends it. Its standard error goes to a log file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._buffer = b""
        self.started_s = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, **environment}, bufsize=0,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; raises EngineError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise EngineError(self._why_dead()) from None
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s, str(request["op"])))
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Ask it to quit; end it if it doesn't."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.write(b'{"op": "quit"}\n')
            try:
                self._process.wait(QUIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, deadline_s: float, operation: str) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline_s - time.monotonic())):
                self._process.kill()  # its answer would be taken for that to the next request
                raise EngineError(f"no answer to {operation!r} in time")
            chunk = os.read(self._process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise EngineError(self._why_dead())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _why_dead(self) -> str:
        code = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended with code {code}: " + " / ".join(lines[-LAST_LINES:])[-400:]
