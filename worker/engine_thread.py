"""The thread that the engine lives in, and the two bounded ways across: commands in, replies out.

The engine touches no event loop and the event loop never waits for the engine. If the publisher falls behind, the engine pauses
at its next step instead of piling up replies.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from protocol.ids import RequestId
from protocol.job import Job
from worker.engine import Engine
from worker.errors import DeviceLostError
from worker.integrity import IntegrityEvent
from worker.outgoing import Outgoing
from worker.spans import JobSpans

Result = TypeVar("Result")

_log = structlog.get_logger(__name__)

MAX_COMMANDS = 10_000
MAX_UNPUBLISHED_STEPS = 64
IDLE_S = 0.1
MAX_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the outside may know of an engine between two steps."""

    pages_total: int
    pages_free: int
    pages_cached: int
    running_sequences: int
    waiting_sequences: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    engine_steps: int
    preemptions: int
    failed_requests: int
    integrity_violations: int
    batch_sizes: tuple[int, ...]
    batched_sequences: int
    integrity: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class _Drop:
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class _FailAll:
    message: str


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[Engine], Any]
    done: Future[Any]


class _Stop:
    """Leave the thread after the commands before this one."""


_Command = _Submit | _Cancel | _Drop | _FailAll | _Call | _Stop


class EngineThread:
    """Runs an engine. `deliver` is called in the engine's thread with each step's replies and must not block."""

    def __init__(
        self, engine: Engine, deliver: Callable[[list[Outgoing]], None], spans: JobSpans | None = None
    ) -> None:
        self._engine = engine
        self._spans = spans or JobSpans(None)
        self._deliver = deliver
        self._commands: queue.Queue[_Command] = queue.Queue(MAX_COMMANDS)
        self._unpublished = threading.BoundedSemaphore(MAX_UNPUBLISHED_STEPS)
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._end: Future[Exception | None] = Future()
        self._busy_since: float | None = None
        self._events: deque[IntegrityEvent] = deque(maxlen=MAX_EVENTS)
        self.gauges = self._read_gauges()

    def start(self) -> None:
        """Begin to take commands."""
        self._thread.start()

    async def ended(self) -> None:
        """Wait until the thread has ended."""
        await asyncio.shield(asyncio.wrap_future(self._end))

    @property
    def failure(self) -> Exception | None:
        """What ended the thread, if it wasn't told to end."""
        return self._end.result() if self._end.done() else None

    def submit(self, job: Job) -> None:
        """Hand over a job."""
        self._spans.accepted(job)
        self._commands.put_nowait(_Submit(job))

    @property
    def has_room(self) -> bool:
        """Whether it can be told more. What only comes in is to wait for that; half of the room is for the rest."""
        return self._commands.qsize() < MAX_COMMANDS // 2

    def cancel(self, request_id: RequestId) -> None:
        """Drop a request, now or when it arrives."""
        self._commands.put_nowait(_Cancel(request_id))

    def drop(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request if this attempt of it is here. A later one that comes isn't touched."""
        self._commands.put_nowait(_Drop(request_id, attempt))

    def fail_all(self, message: str) -> None:
        """End every request because the worker stops."""
        self._commands.put_nowait(_FailAll(message))

    def call(self, work: Callable[[Engine], Result]) -> Future[Result]:
        """Do something to the engine between two of its steps."""
        done: Future[Result] = Future()
        self._commands.put_nowait(_Call(work, done))
        return done

    def take_events(self) -> list[IntegrityEvent]:
        """What the integrity checks found since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def published(self) -> None:
        """One delivered step has left the process."""
        self._unpublished.release()

    def is_progressing(self, stall_s: float) -> bool:
        """Whether the engine is idle or its present step is younger than `stall_s`. A dead thread makes no progress."""
        busy_since = self._busy_since
        is_stuck = busy_since is not None and time.monotonic() - busy_since > stall_s
        return self._thread.is_alive() and not is_stuck

    def stop(self, timeout_s: float) -> None:
        """End the thread after what was commanded before."""
        self._commands.put_nowait(_Stop())
        self._thread.join(timeout_s)

    def _live(self) -> None:
        failure = None
        try:
            self._run()
        except Exception as error:
            failure = error
        self._end.set_result(failure)

    def _run(self) -> None:
        while self._obey(wait=not self._engine.has_work):
            self._busy_since = time.monotonic()
            replies = self._engine.step()
            self.gauges = self._read_gauges()
            self._busy_since = None
            if replies:
                self._spans.replied(replies)
                # While Redis is away this waits; the worker's heartbeat is away then too.
                self._unpublished.acquire()
                self._deliver(replies)

    def _obey(self, *, wait: bool) -> bool:
        """Carry out all waiting commands, or the next one if there is no other work; False to stop."""
        while True:
            try:
                command = self._commands.get(block=wait, timeout=IDLE_S)
            except queue.Empty:
                if not wait:
                    return True
                self._rest()
                continue
            wait = False
            if isinstance(command, _Stop):
                return False
            self._carry_out(command)

    def _rest(self) -> None:
        """Idle: look after the pool, and tell what was found."""
        self._engine.scrub()
        self.gauges = self._read_gauges()

    def _carry_out(self, command: _Submit | _Cancel | _Drop | _FailAll | _Call) -> None:
        if isinstance(command, _Submit):
            self._engine.submit(command.job)
        elif isinstance(command, _Cancel):
            self._engine.cancel(command.request_id)
        elif isinstance(command, _Call):
            try:
                command.done.set_result(command.work(self._engine))
            except Exception as error:  # the caller's, not the engine's
                command.done.set_exception(error)
                if isinstance(error, DeviceLostError):
                    raise
        elif isinstance(command, _Drop):
            self._engine.drop(command.request_id, command.attempt)
        else:
            self._engine.fail_all("shutting_down", command.message)

    def _read_gauges(self) -> Gauges:
        engine = self._engine
        self._events.extend(engine.integrity.take_events())
        pool, scheduler, totals = engine.cache.pool, engine.scheduler, engine.totals
        return Gauges(
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            running_sequences=len(scheduler.running),
            waiting_sequences=len(scheduler.queue),
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            engine_steps=totals.steps,
            preemptions=scheduler.num_preemptions,
            failed_requests=totals.failed_requests,
            integrity_violations=engine.integrity.totals.num_violations,
            integrity=engine.integrity.totals.snapshot(),
            batch_sizes=tuple(totals.batch_sizes),
            batched_sequences=totals.batched_sequences,
        )
