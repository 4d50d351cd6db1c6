"""Traces for an OpenTelemetry collector (OTLP over HTTP). Off unless an endpoint is set; the packages are those of the extra `tracing`."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sluicegate.errors import CommandError

SHUTDOWN_MS = 5000


@contextmanager
def tracing(process: str, endpoint: str | None) -> Iterator[Any]:
    """A tracer, None without an endpoint; what it has gathered is sent at the end of the block. Raises CommandError."""
    if endpoint is None:
        yield None
        return
    if not endpoint.startswith(("http://", "https://")):
        raise CommandError("trace-endpoint: expected http://HOST:PORT/v1/traces or https://...")
    try:
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise CommandError(
            f"trace-endpoint: needs the extra 'tracing' (pip install sluicegate[tracing]): {error}"
        ) from None
    resource = resources.Resource.create({"service.name": f"sluicegate-{process}"})
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield provider.get_tracer("sluicegate")
    finally:
        provider.force_flush(SHUTDOWN_MS)
        provider.shutdown()
