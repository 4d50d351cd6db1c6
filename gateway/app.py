"""One gateway process, composed. Life: connect, serve, and on SIGTERM or SIGINT: stop being ready, let answers finish within the grace time,
end the rest with an error, leave.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp.http_parser
import structlog
from aiohttp import web

from gateway.access_guard import AccessGuard
from gateway.admin.routes import admin_routes
from gateway.auth import Authenticator
from gateway.body import BodyMemory, expect_later
from gateway.completions import chat_completions, text_completions
from gateway.connection import ConnectionLimits, DoorRunner, raise_file_limit
from gateway.generation import Generations
from gateway.health import live, metrics, open_metrics, ready, workers
from gateway.intake.call import IntakeLimits
from gateway.intake.pool import IntakePool
from gateway.lease_watch import LeaseWatch
from gateway.limits.ledger import Ledger
from gateway.limits.upkeep import Upkeep
from gateway.liveness import Liveness
from gateway.memory import keep_heap_small, keep_trimmed
from gateway.metrics import Metrics
from gateway.middleware import add_headers, around
from gateway.model_directory import ModelDirectory
from gateway.models import get_model, list_models
from gateway.openapi import openapi
from gateway.parts import PARTS, Parts
from gateway.price_store import PriceBook, PriceStore
from gateway.redis_link import RedisLink, open_redis
from gateway.reply_reader import ReplyReader
from gateway.routing import Router
from gateway.settings import GatewaySettings, SettingsError
from gateway.share_book import ShareBook
from gateway.share_store import ShareStore
from gateway.submitter import QueueBounds, Submitter
from gateway.tenancy_watch import TenancyWatch
from gateway.tenant_store import TenantStore
from gateway.tracing import Tracing
from gateway.usage_routes import usage
from protocol.replies import Failed

_log = structlog.get_logger(__name__)

BACKLOG = 1024
# asyncio accepts as many connections in one go as the backlog that it is told; a flood of them must not hold up the streams.
ACCEPT_AT_ONCE = 32
LAST_WORDS_S = 2.0
CANCEL_AGAIN_S = 0.2


def create_app(parts: Parts) -> web.Application:
    """The routes over running parts."""
    app = web.Application(middlewares=[around], client_max_size=parts.settings.max_body_bytes)
    app[PARTS] = parts
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions, expect_handler=expect_later),
            web.post("/v1/completions", text_completions, expect_handler=expect_later),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{model:.+}", get_model),
            web.get("/openapi.json", openapi),
            web.get("/health/live", live),
            web.get("/health/ready", ready),
            web.get("/metrics", metrics),
            web.get("/admin/v1/workers", workers),
            web.get("/v1/usage", usage),
            *admin_routes(),
        ]
    )
    return app


def create_operator_app(parts: Parts) -> web.Application:
    """What a second port serves to those who can reach it."""
    app = web.Application(middlewares=[around])
    app[PARTS] = parts
    app.add_routes([web.get("/metrics", open_metrics), web.get("/health/live", live), web.get("/health/ready", ready)])
    return app


def create_runner(parts: Parts, app: web.Application | None = None) -> web.AppRunner:
    """An application, `create_app`'s if none is given, on connections that clients can't abuse."""
    settings = parts.settings
    limits = ConnectionLimits(
        settings.max_connections, settings.head_timeout_s, settings.idle_timeout_s, settings.slow_reader_s
    )
    return DoorRunner(app or create_app(parts), limits, parts.metrics, shutdown_timeout=LAST_WORDS_S)


@asynccontextmanager
async def running_parts(settings: GatewaySettings, tracer: Any | None = None) -> AsyncIterator[Parts]:
    """All parts with their tasks; a Redis that's away at the start is waited for in the background."""
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(open_redis(settings.redis_url, settings.key_prefix))
        store = TenantStore(link.commands, link.keys, settings.key_pepper)
        directory = ModelDirectory(link)
        limits = IntakeLimits(settings.max_choices, settings.max_prompts, settings.max_request_timeout_s)
        intake = IntakePool(
            directory, limits, settings.intake_processes, settings.intake_timeout_s, settings.intake_wait_s
        )
        await intake.start()
        stack.push_async_callback(intake.close)
        reader = ReplyReader(link, settings.gateway_id)
        stack.push_async_callback(reader.close)
        bounds = QueueBounds(
            settings.max_waiting_jobs, settings.max_waiting_tokens, settings.max_tenant_jobs, settings.max_tenant_tokens
        )
        counts = Metrics()
        router = Router(link.keys, directory, settings.routing_key, counts.routed)
        submitter = Submitter(link, settings.job_signing_key, bounds, router)
        watch = TenancyWatch(link)
        stack.push_async_callback(watch.close)
        ledger, upkeep = _accounts(settings, link, watch)
        shares = ShareBook(link, ShareStore(link.commands, link.keys, settings.key_pepper), watch)
        generations = Generations(settings, link, reader, submitter, ledger, shares, router)
        directory.on_refresh = Liveness(link, reader, submitter).look
        auth = Authenticator(link, store, watch, settings.key_pepper, settings.admin_key, settings.key_cache_s)
        watch.on_change, watch.on_poll = auth.forget, AccessGuard(auth, generations).check
        leases = LeaseWatch(link, reader, submitter, settings.gateway_id)
        jobs = (
            reader.keep_open(),
            reader.run(),
            directory.run(),
            watch.run(),
            upkeep.run(),
            leases.run(),
            keep_trimmed(),
        )
        tasks = [asyncio.create_task(job) for job in jobs]
        stack.push_async_callback(_cancel, tasks)
        stack.push_async_callback(generations.close)
        bodies, traces = BodyMemory(settings.max_buffered_bytes), Tracing(tracer)
        yield Parts(settings, link, auth, watch, directory, intake, reader, generations, counts, bodies, traces, tasks)


def _accounts(settings: GatewaySettings, link: RedisLink, watch: TenancyWatch) -> tuple[Ledger, Upkeep]:
    prices = PriceBook(link, PriceStore(link.commands, link.keys, settings.key_pepper), watch)
    keep_rows_s = settings.usage_rows_days * 86_400
    ledger = Ledger(link, watch, prices, settings.lease_s, keep_rows_s)
    return ledger, Upkeep(link, ledger, watch, settings.lease_s, keep_rows_s)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    # More than once: asyncio.wait_for of Python 3.11, which redis-py uses, loses a cancellation that comes as its result does.
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def run(settings: GatewaySettings, tracer: Any | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises SettingsError if it can't start."""
    if not hasattr(aiohttp.http_parser, "HttpRequestParserC"):
        raise SettingsError("aiohttp was installed without its C parser, which is the one that is safe to expose")
    keep_heap_small()
    raise_file_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with running_parts(settings, tracer) as parts:
        runner, operators = create_runner(parts), create_runner(parts, create_operator_app(parts))
        try:
            site = await _listen(runner, settings.host, settings.port)
            if settings.metrics_port is not None:
                await _listen(operators, settings.metrics_host, settings.metrics_port)
                _log.info("metrics_ready", host=settings.metrics_host, port=_port(operators))
            _log.info("gateway_ready", host=settings.host, port=_port(runner), gateway_id=settings.gateway_id)
            crashed = await _wait_for_end(stopping, parts.tasks)
            await _drain(parts, site)
            for task in crashed:
                task.result()  # raises what ended it: a process that lost a part must not go on
        finally:
            await runner.cleanup()
            await operators.cleanup()
    _log.info("gateway_stopped")


def _on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would print with the exception's text, which may quote what a client sent."""
    _log.error("loop_error", problem=context["message"].partition(":")[0][:100], exc_info=context.get("exception"))


async def _listen(runner: web.AppRunner, host: str, port: int) -> web.SockSite:
    await runner.setup()
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        listening = socket.create_server(address, family=family)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    site = web.SockSite(runner, listening, backlog=ACCEPT_AT_ONCE)
    await site.start()
    listening.listen(BACKLOG)
    return site


async def _wait_for_end(stopping: asyncio.Event, tasks: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Until a signal, or until a task that should run for ever has ended; returns those."""
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait([signalled, *tasks], return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    crashed = [task for task in tasks if task.done()]
    for task in crashed:
        _log.critical("gateway_part_crashed", exc_info=task.exception())
    return crashed


def _port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])


async def _drain(parts: Parts, site: web.SockSite) -> None:
    """Answers may finish; what's left after the grace time gets an error frame."""
    parts.is_draining = True
    _log.info("gateway_draining", open_requests=parts.num_answering)
    await site.stop()
    await _wait_until_idle(parts, parts.settings.drain_grace_s)
    if parts.num_answering:
        parts.generations.fail_all(Failed("shutting_down", "the gateway was stopped before the answer was complete"))
        await _wait_until_idle(parts, LAST_WORDS_S)


async def _wait_until_idle(parts: Parts, timeout_s: float) -> None:
    end_s = asyncio.get_running_loop().time() + timeout_s
    while parts.num_answering and asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(0.05)
