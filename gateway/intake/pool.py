"""The gateway's side of the intake: a few processes, each busy with one request at a time and killed when it takes too long.

Large bodies never hold all of them, and nobody waits longer than a set time for a free one.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import structlog

from gateway.errors import ApiError, bad_request, unavailable
from gateway.intake.call import GenerationCall, IntakeLimits, ServedModel
from gateway.intake.wire import HEADER_BYTES, frame, unframe
from gateway.memory import LARGE_BYTES
from gateway.model_directory import ModelDirectory
from protocol.codec import decode, encode

_log = structlog.get_logger(__name__)

LOAD_TIMEOUT_S = 10.0


class _Process:
    """One intake process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_Process":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.intake.child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
        )  # fmt: skip
        return cls(process)

    async def ask(self, request: list[Any], timeout_s: float) -> list[Any]:
        """One exchange. After any exception the process is useless and must be ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with asyncio.timeout(timeout_s):
            stdin.write(frame(request))
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(HEADER_BYTES), "little")
            return unframe(await stdout.readexactly(size))

    async def end(self) -> None:
        """Kill and reap it."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def _environment() -> dict[str, str]:
    """No secrets of the gateway's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLUICEGATE_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class IntakePool:
    """Turns bodies into calls."""

    def __init__(
        self, directory: ModelDirectory, limits: IntakeLimits, num_processes: int, timeout_s: float, wait_s: float
    ) -> None:
        self._directory = directory
        self._limits = [limits.max_choices, limits.max_prompts, limits.max_timeout_s]
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._large = asyncio.Semaphore(max(1, num_processes - 1))
        self._num_processes = num_processes
        self._idle: asyncio.Queue[_Process | None] = asyncio.Queue()
        self._all: set[_Process] = set()
        self._exchanges: set[asyncio.Future[list[Any]]] = set()

    @property
    def num_free(self) -> int:
        """Processes that wait for work."""
        return self._idle.qsize()

    async def start(self) -> None:
        """Start all processes."""
        for _ in range(self._num_processes):
            self._idle.put_nowait(await self._new())

    async def close(self) -> None:
        """End all processes."""
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._all))

    async def call(
        self,
        kind: Literal["chat", "completion"],
        body: bytes,
        view: Callable[[list[ServedModel]], list[ServedModel]] = list,
    ) -> GenerationCall:
        """The checked call in a body, of a caller who sees the models that `view` leaves; raises ApiError."""
        models = view(await self._directory.served())
        request = [kind, body, _rows(models), self._limits]
        is_large = len(body) > LARGE_BYTES
        process = await self._turn(is_large=is_large)
        # Whoever leaves meanwhile lets the exchange end by itself: the process stays useful, a new one costs more than most requests.
        exchange = asyncio.ensure_future(self._exchange(process, request, is_large=is_large))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        return _result(await asyncio.shield(exchange))

    async def _turn(self, *, is_large: bool) -> _Process | None:
        """A free process, None if one must be started; raises ApiError 503 when none becomes free in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                if is_large:
                    await self._large.acquire()
                try:
                    return await self._idle.get()
                except asyncio.CancelledError:
                    if is_large:
                        self._large.release()
                    raise
        except TimeoutError:
            _log.warning("intake_busy", is_large=is_large)
            raise unavailable("This gateway is busy preparing other requests; try again.", "overloaded") from None

    async def _exchange(self, process: _Process | None, request: list[Any], *, is_large: bool) -> list[Any]:
        """Ask, and give the process back."""
        back: _Process | None = None  # a process that failed is replaced when it's needed
        try:
            process = process or await self._new()
            answer = await self._ask(process, request)
            back = process
        except TimeoutError:
            _log.warning("intake_timeout", body_bytes=len(request[1]))
            raise bad_request("The request takes too long to be prepared.") from None
        except (OSError, EOFError, asyncio.IncompleteReadError):
            _log.warning("intake_process_died", body_bytes=len(request[1]))
            raise unavailable("The request could not be prepared; try again.") from None
        finally:
            try:
                if back is None and process is not None:
                    await self._end(process)
            finally:
                self._idle.put_nowait(back)
                if is_large:
                    self._large.release()
        return answer

    async def _ask(self, process: _Process, request: list[Any]) -> list[Any]:
        answer = await process.ask(request, self._timeout_s)
        if answer[0] == "need":
            card = await self._directory.card(answer[1])
            loaded = await process.ask(["load", answer[1], encode(card.tokenizer)], LOAD_TIMEOUT_S)
            answer = loaded if loaded[0] == "error" else await process.ask(request, self._timeout_s)
        return answer

    async def _new(self) -> _Process:
        process = await _Process.start()
        self._all.add(process)
        return process

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        await process.end()


def _rows(models: Iterable[ServedModel]) -> list[list[Any]]:
    return [[m.name, m.card_digest, m.max_request_tokens, m.max_output_tokens] for m in models]


def _result(answer: list[Any]) -> GenerationCall:
    if answer[0] == "error":
        _, status, message, kind, code, param = answer
        raise ApiError(status, message, kind, code, param)
    return decode(GenerationCall, answer[1])
