"""One span for each job that a worker computes, from its arrival to its last reply, under the gateway's span that the job names.

Called from the event loop (arrivals) and the engine's thread (replies). Without a tracer it does nothing.
"""

from collections.abc import Iterable
from typing import Any

from protocol.ids import RequestId
from protocol.job import Job
from protocol.replies import Delta, Done, Failed
from worker.outgoing import Outgoing

MAX_OPEN = 10_000


class JobSpans:
    """The spans that are open."""

    def __init__(self, tracer: Any | None) -> None:
        self._tracer = tracer
        self._open: dict[RequestId, Any] = {}
        self._waiting_for_token: set[RequestId] = set()

    def accepted(self, job: Job) -> None:
        """A job has come."""
        if self._tracer is None:
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if job.trace_context is None else {"traceparent": job.trace_context}
        attributes = {
            "sluicegate.model": job.model, "sluicegate.request_id": job.request_id, "sluicegate.tenant": job.tenant,
            "sluicegate.attempt": job.attempt, "sluicegate.prompt_tokens": len(job.prompt_token_ids), "sluicegate.n": job.n,
        }  # fmt: skip
        parent = TraceContextTextMapPropagator().extract(carrier)
        if len(self._open) >= MAX_OPEN:  # of jobs that were dropped without a last reply
            self._end(next(iter(self._open)))
        self._open[job.request_id] = self._tracer.start_span(
            "worker.job", context=parent, kind=SpanKind.CONSUMER, attributes=attributes
        )
        self._waiting_for_token.add(job.request_id)

    def replied(self, replies: Iterable[Outgoing]) -> None:
        """Replies leave the engine."""
        if not self._open:
            return
        for outgoing in replies:
            request_id, reply = outgoing.envelope.request_id, outgoing.envelope.reply
            span = self._open.get(request_id)
            if span is None:
                continue
            if isinstance(reply, Delta) and request_id in self._waiting_for_token:
                self._waiting_for_token.discard(request_id)
                span.add_event("first_token")
            elif isinstance(reply, Done):
                span.set_attribute("sluicegate.cached_tokens", reply.cached_tokens)
                span.set_attribute("sluicegate.completion_tokens", reply.completion_tokens)
                self._end(request_id)
            elif isinstance(reply, Failed):
                self._fail(span, reply)
                self._end(request_id)

    def _fail(self, span: Any, reply: Failed) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, reply.code))

    def _end(self, request_id: RequestId) -> None:
        self._waiting_for_token.discard(request_id)
        span = self._open.pop(request_id, None)
        if span is not None:
            span.end()
