"""One worker, composed: engine thread, and the tasks that join it to Redis.

Life: load the model, join the group, beat, consume. On SIGTERM or SIGINT: take no more jobs, finish those it has within the grace
time, hand the rest over to other workers, leave. A second signal ends the grace time. So does an error in the engine's thread: jobs are handed over
at once, and the process ends with it.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from protocol.ids import ModelName, RequestId
from worker.audit_writer import AuditWriter
from worker.consumer import Consumer, watch_cancels
from worker.engine_thread import EngineThread
from worker.fault_control import FaultControl
from worker.heartbeat import Heartbeat
from worker.in_flight import InFlight
from worker.job_queue import JobQueue
from worker.leases import LeaseKeeper
from worker.outgoing import Outgoing
from worker.prefix_publisher import PrefixPublisher
from worker.prepared import Prepared
from worker.publisher import Publisher
from worker.reaper import Reaper
from worker.redis_link import NETWORK_ERRORS, RECONNECT_S, RedisLink, open_redis
from worker.settings import WorkerSettings
from worker.spans import JobSpans

_log = structlog.get_logger(__name__)

# The engine thread comes back from native code 30 times a layer stack; with the default of 5 ms it would wait for the event loop
# each time that one is busy.
THREAD_SWITCH_S = 0.0005
CANCEL_SETTLE_S = 5.0
CANCEL_AGAIN_S = 0.2


async def run(settings: WorkerSettings, tracer: Any | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises WorkerError, ModelError or KernelError if it cannot start, or go on."""
    stopping = _Signals()
    sys.setswitchinterval(THREAD_SWITCH_S)
    prepare = _preparation(settings)
    async with open_redis(settings.redis_url, settings.key_prefix) as link:
        started = time.monotonic()
        prepared = await asyncio.to_thread(prepare)
        if stopping.is_set():
            return
        seconds = round(time.monotonic() - started, 2)
        _log.info("model_loaded", model=settings.model_name, seconds=seconds, **prepared.facts)
        await _Worker(link, settings, prepared, JobSpans(tracer)).serve(stopping)


def _preparation(settings: WorkerSettings) -> Callable[[], Prepared]:
    """Imported as it's needed: a worker without a model loads no torch."""
    if settings.synthetic is not None:
        from worker.synthetic.engine import preparation
    else:
        from worker.model_engine import preparation
    return preparation(settings)


class _Signals:
    """SIGTERM and SIGINT as an event, from the first line on: a signal during loading counts too."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._first.is_set()

    async def wait(self) -> None:
        """Until the first signal."""
        await self._first.wait()

    async def wait_again(self) -> None:
        """Until the second signal."""
        await self._second.wait()


class _Worker:
    """The running parts."""

    def __init__(self, link: RedisLink, settings: WorkerSettings, prepared: Prepared, spans: JobSpans) -> None:
        self._settings = settings
        self._in_flight = InFlight(settings.max_sequences, lambda: self._engine.gauges.waiting_sequences)
        self._is_draining = False
        card = prepared.card
        self._engine = EngineThread(prepared.engine, self._deliver, spans)
        self._queue = JobQueue(link, card.name, settings.worker_id, int(settings.lease_s * 1000))
        self._publisher = Publisher(link, self._queue, self._on_sent, self._drop)
        self._consumer = Consumer(
            link,
            self._queue,
            card.name,
            settings.job_signing_key,
            settings.max_deliveries,
            self._engine,
            self._in_flight,
            prepared.engine.cache.held.note_session,
            lambda: self._engine.is_progressing(settings.stall_s),
        )
        self._prefixes = PrefixPublisher(link, card.name, settings.worker_id, prepared.engine.cache.held)
        self._leases = LeaseKeeper(link, self._queue, self._engine, self._in_flight, settings, self._drop)
        self._heartbeat = Heartbeat(link, card, self._engine, settings, lambda: self._is_draining)
        self._reaper = Reaper(link, self._queue, card.name, settings)
        self._link = link
        self._model = ModelName(card.name)
        self._loop = asyncio.get_running_loop()

    async def serve(self, stopping: _Signals) -> None:
        """Take jobs until told to stop, then drain. An error in one of the tasks ends the worker; so does one of the engine, which is raised once its
        jobs are handed over.
        """
        self._engine.start()
        await self._heartbeat.beat()
        _log.info("worker_ready", worker_id=self._settings.worker_id, model=self._model)
        async with asyncio.TaskGroup() as tasks:
            consuming = tasks.create_task(self._consumer.run(), name="consumer")
            others = [
                tasks.create_task(job, name=name)
                for name, job in (
                    ("cancels", watch_cancels(self._link, self._model, self._engine)),
                    ("publisher", self._publisher.run()),
                    ("leases", self._leases.run()),
                    ("heartbeat", self._heartbeat.run()),
                    ("reaper", self._reaper.run()),
                    ("audit", AuditWriter(self._link, self._model, self._settings.worker_id, self._engine).run()),
                )
            ]
            if self._settings.allow_fault_injection:
                control = FaultControl(self._link, self._model, self._settings.worker_id, self._engine)
                others.append(tasks.create_task(control.run(), name="faults"))
            if self._settings.routing_key:
                others.append(tasks.create_task(self._prefixes.run(), name="prefixes"))
            await _first_of(stopping.wait(), self._engine.ended())
            await self._stop(consuming, stopping)
            await _cancel(others)
        await self._leave()
        if self._engine.failure is not None:
            raise self._engine.failure

    async def _stop(self, consuming: asyncio.Task[None], stopping: _Signals) -> None:
        """Take no more jobs, and let those that there are come to their ends, here or elsewhere."""
        self._is_draining = True
        self._consumer.stop()
        await asyncio.wait([consuming])
        await self._say_full()
        await self._drain(stopping)

    async def _say_full(self) -> None:
        try:
            await self._queue.leave()
        except NETWORK_ERRORS as error:
            self._link.failed(error)  # it isn't believed to have room for long

    async def _drain(self, stopping: _Signals) -> None:
        _log.info("worker_draining", jobs=len(self._in_flight))
        await _first_of(
            self._in_flight.wait_until_empty(),
            stopping.wait_again(),
            self._engine.ended(),
            timeout_s=self._settings.drain_grace_s,
        )
        if len(self._in_flight) and await self._hand_over() and self._engine.failure is None:
            self._engine.fail_all("the worker was stopped before the request was complete")
            await _first_of(self._in_flight.wait_until_empty(), self._engine.ended(), timeout_s=CANCEL_SETTLE_S)

    async def _hand_over(self) -> bool:
        """Let go of what isn't complete: what the engine says of it from here on is refused by Redis. False if Redis stays away: then the leases
        end by themselves, and the requests must not be failed here.
        """
        end_s = self._loop.time() + CANCEL_SETTLE_S
        while True:
            try:
                released = await self._queue.release(
                    self._in_flight.holdings(), is_delivery=self._engine.failure is not None
                )
            except NETWORK_ERRORS as error:
                self._link.failed(error)
            else:
                _log.info("jobs_handed_over", jobs=released)
                return True
            if self._loop.time() > end_s:
                return False
            await asyncio.sleep(RECONNECT_S)

    async def _leave(self) -> None:
        self._engine.stop(timeout_s=CANCEL_SETTLE_S)
        try:
            await self._heartbeat.leave()
            await self._prefixes.leave()
        except NETWORK_ERRORS as error:
            _log.warning("worker_left_without_redis", error=type(error).__name__)
        _log.info("worker_stopped", unfinished_jobs=len(self._in_flight))

    def _deliver(self, replies: list[Outgoing]) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._publisher.put, replies)

    def _drop(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """A job isn't wanted from here any more."""
        if self._in_flight.give_up(request_id, attempt):
            _log.warning("job_dropped", request_id=request_id, attempt=attempt, reason=reason)
            self._engine.drop(request_id, attempt)

    def _on_sent(self, replies: list[Outgoing]) -> None:
        self._engine.published()
        for reply in replies:
            if reply.is_terminal:
                self._in_flight.ended(reply)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Until they have ended; an error of theirs is left to the task group."""
    # More than once: asyncio.wait_for of Python 3.11, which redis-py uses, loses a cancellation that comes as its result does.
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def _first_of(*waits: Coroutine[Any, Any, None], timeout_s: float | None = None) -> None:
    """Until one of them is done or the time is up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
