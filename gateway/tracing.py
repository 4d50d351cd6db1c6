"""A request's spans, and their context on its way into the job. Without a tracer all of it is nothing; OpenTelemetry need not be installed.

Spans carry ids and numbers, never a prompt, a key or an answer.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import structlog
from aiohttp import web

_UNTRACED = ("/health/live", "/health/ready", "/metrics", "unmatched")


class Tracing:
    """Makes spans with a tracer, or none."""

    def __init__(self, tracer: Any | None) -> None:
        self._tracer = tracer

    @contextmanager
    def request(self, request: web.Request, route: str) -> Iterator[Any | None]:
        """The span of a whole request, a child of the one that a `traceparent` header names."""
        if self._tracer is None or route in _UNTRACED:
            yield None
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        parent = _incoming(request)
        attributes = {"http.request.method": request.method, "http.route": route}
        name = f"{request.method} {route}"
        with self._tracer.start_as_current_span(
            name, context=parent, kind=SpanKind.SERVER, attributes=attributes, record_exception=False,
            set_status_on_exception=False,
        ) as span:  # fmt: skip
            structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
            try:
                yield span
            except BaseException as error:  # its text may hold what a client sent
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise

    def step(self, name: str, **attributes: str | int) -> AbstractContextManager[Any | None]:
        """The span of one step of the present request."""
        if self._tracer is None:
            return nullcontext()
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        )
        return span


def current_context() -> str | None:
    """The present span as a W3C `traceparent`, None if there is none."""
    try:
        from opentelemetry.trace import get_current_span
    except ImportError:
        return None
    context = get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _incoming(request: web.Request) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    given = request.headers.getall("traceparent", [])
    return TraceContextTextMapPropagator().extract({"traceparent": given[0]} if len(given) == 1 else {})
