"""POST /v1/chat/completions and POST /v1/completions: from the body to the last byte."""

import asyncio
import time
from functools import partial
from typing import Literal

import structlog
from aiohttp import web

from gateway.auth import Principal
from gateway.body import read_body
from gateway.errors import ApiError, crashed, from_failure, unavailable
from gateway.generation import Generation, raise_if_failed
from gateway.intake.call import GenerationCall
from gateway.limits.caller_view import check_samples, models_of
from gateway.middleware import RATE_HEADERS
from gateway.parts import PARTS, Parts
from gateway.routing import session_of
from gateway.shapes import ChatShaper, CompletionShaper, Shaper
from gateway.sse import DONE, KEEP_ALIVE, EventStream, SlowReader, event
from protocol.replies import Delta, Failed

_log = structlog.get_logger(__name__)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """A chat answer, whole or as a stream."""
    return await _answer(request, "chat")


async def text_completions(request: web.Request) -> web.StreamResponse:
    """Continuations of one or more prompts, whole or as a stream."""
    return await _answer(request, "completion")


async def _answer(request: web.Request, kind: Literal["chat", "completion"]) -> web.StreamResponse:
    parts = request.app[PARTS]
    caller = await parts.auth.tenant(request)
    structlog.contextvars.bind_contextvars(tenant=caller.tenant)
    if parts.is_draining:
        raise unavailable("This gateway is shutting down; try again.", "shutting_down")
    parts.num_answering += 1
    try:
        return await _admitted(request, parts, kind, caller)
    finally:
        parts.num_answering -= 1


async def _admitted(
    request: web.Request, parts: Parts, kind: Literal["chat", "completion"], caller: Principal
) -> web.StreamResponse:
    session = session_of(request)
    call = await _prepared(request, parts, kind, caller)
    check_samples(caller, call)
    started_s = time.monotonic()
    async with parts.generations.open(call, caller, session) as generation:
        request[RATE_HEADERS] = generation.account.headers
        structlog.contextvars.bind_contextvars(request_id=generation.account.id)
        shaper = await _shaper(parts, call)
        if call.stream:
            return await _Relay(request, parts, call, generation, shaper, started_s).run()
        return await _whole(parts, call, generation, shaper, started_s)


async def _prepared(
    request: web.Request, parts: Parts, kind: Literal["chat", "completion"], caller: Principal
) -> GenerationCall:
    settings = parts.settings
    with parts.bodies.share(caller.tenant) as share:
        with parts.tracing.step("read body"):
            body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s, share)
        with parts.tracing.step("prepare", body_bytes=len(body)):
            return await parts.intake.call(kind, body, partial(models_of, caller))


async def _shaper(parts: Parts, call: GenerationCall) -> Shaper:
    fleet = parts.directory.fleet.statuses
    statuses = next((found for name, found in fleet.items() if name == call.model), [])
    fingerprint = "fp_" + (statuses[0].card_digest[:12] if statuses else "unknown")
    return ChatShaper(call, fingerprint) if call.kind == "chat" else CompletionShaper(call, fingerprint)


async def _whole(
    parts: Parts, call: GenerationCall, generation: Generation, shaper: Shaper, started_s: float
) -> web.StreamResponse:
    has_token = False
    while not generation.is_finished:
        replies = await generation.take()
        raise_if_failed(replies)
        for slot, reply in replies:
            shaper.collect(slot, reply)
            if isinstance(reply, Delta) and not has_token:
                has_token = True
                parts.metrics.first_token(call.model, time.monotonic() - started_s)
    return web.json_response(shaper.whole(generation.usage()))


class _Relay:
    """One stream: replies in, events out."""

    def __init__(
        self, request: web.Request, parts: Parts, call: GenerationCall, generation: Generation, shaper: Shaper,
        started_s: float,
    ) -> None:  # fmt: skip
        self._stream = EventStream(request, parts.settings.slow_reader_s)
        self._keep_alive_s = parts.settings.keep_alive_s
        self._metrics = parts.metrics
        self._call = call
        self._generation = generation
        self._shaper = shaper
        self._started_s = started_s
        self._last_token_s: float | None = None

    async def run(self) -> web.StreamResponse:
        """Until the last event. A failure before the first byte is an error response, after it an event."""
        try:
            while not self._generation.is_finished:
                await self._relay_once()
            if self._call.include_usage:
                await self._stream.send([event(self._shaper.usage(self._generation.usage()))])
            await self._stream.send([DONE])
        except ApiError as error:
            if not self._stream.is_open:
                raise
            await self._stream.send([b"data: " + error.body() + b"\n\n", DONE])
        except SlowReader:
            _log.warning("slow_reader_cut_off")
            raise
        except ConnectionError:
            raise
        except Exception as error:
            # A second status line would corrupt what the client has: once a byte is out, every failure is an event.
            if not self._stream.is_open:
                raise
            _log.exception("stream_crashed", error=type(error).__name__)
            await self._stream.send([b"data: " + crashed().body() + b"\n\n", DONE])
        return await self._stream.end()

    async def _relay_once(self) -> None:
        await self._stream.wait_turn()
        try:
            async with asyncio.timeout(self._keep_alive_s):
                replies = await self._generation.take()
        except TimeoutError:
            await self._open()
            await self._stream.send([KEEP_ALIVE])
            return
        sound = [(slot, reply) for slot, reply in replies if not isinstance(reply, Failed)]
        if sound:
            await self._open()
            await self._stream.send(event(chunk) for slot, reply in sound for chunk in self._shaper.delta(slot, reply))
            self._count()
        for _, reply in replies:
            if isinstance(reply, Failed):
                raise from_failure(reply)

    async def _open(self) -> None:
        if not self._stream.is_open:
            await self._stream.open()
            await self._stream.send(event(chunk) for chunk in self._shaper.opening())

    def _count(self) -> None:
        now_s = time.monotonic()
        if self._last_token_s is None:
            self._metrics.first_token(self._call.model, now_s - self._started_s)
        else:
            self._metrics.between_tokens(self._call.model, now_s - self._last_token_s)
        self._last_token_s = now_s
