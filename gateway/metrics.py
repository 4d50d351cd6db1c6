"""What /metrics tells. Labels are routes, statuses, models, workers and classes of tenants; never a tenant: it would tell tenants about each other."""

import asyncio
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.model_directory import Fleet
from gateway.worker_metrics import FleetCollector

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
TENANT_CLASSES = ("low", "standard", "high")
JOB_STATES = ("queued", "running")


def tenant_class(weight: float) -> str:
    """One of TENANT_CLASSES: what an operator may know of whose a request is."""
    return "standard" if weight == 1 else "low" if weight < 1 else "high"


@dataclass(frozen=True, slots=True)
class JobMoment:
    """A job of this gateway now. `since_s` is when it was submitted, of the event loop's clock."""

    model: str
    tenant_class: str
    state: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Moment:
    """This gateway now."""

    fleet: Fleet
    is_redis_up: bool
    num_open: int
    jobs: Iterable[JobMoment]
    num_free_intakes: int
    body_bytes: int


class Metrics:
    """This process's counts, and the workers' beside them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "sluicegate_http_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "sluicegate_time_to_first_token_seconds", "From the checked request to its first token.", ["model"],
            buckets=_TTFT_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._itl = Histogram(
            "sluicegate_inter_token_seconds", "Between two writes of a stream.", ["model"],
            buckets=_ITL_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._routed = Counter(
            "sluicegate_routed_jobs", "Jobs by what came of choosing a worker that holds their prefix or session.",
            ["model", "outcome"], registry=self._registry,
        )  # fmt: skip
        self._jobs = self._gauge("jobs", "Jobs of this gateway by state.", "model", "tenant_class", "state")
        self._oldest = self._gauge("oldest_queued_seconds", "How long the oldest queued job waits.", "tenant_class")
        self._open = self._gauge("open_requests", "Requests being answered.")
        self._redis = self._gauge("redis_up", "Whether Redis answers.")
        self._intakes = self._gauge("free_intake_processes", "Processes that wait for a body to check and tokenize.")
        self._bodies = self._gauge("body_bytes", "Bytes of bodies in memory.")
        self._fleet = FleetCollector()
        self._registry.register(self._fleet)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"sluicegate_{name}", text, labels, registry=self._registry)

    def request(self, route: str, status: int) -> None:
        """A request has ended."""
        self._requests.labels(route, str(status)).inc()

    def routed(self, model: str, outcome: str) -> None:
        """A job was submitted while there was a choice of workers."""
        self._routed.labels(model, outcome).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """A request's first token has come."""
        self._ttft.labels(model).observe(seconds)

    def between_tokens(self, model: str, seconds: float) -> None:
        """A stream's next write has come."""
        self._itl.labels(model).observe(seconds)

    def render(self, moment: Moment) -> bytes:
        """The text of /metrics."""
        self._fleet.show(moment.fleet)
        self._redis.set(int(moment.is_redis_up))
        self._open.set(moment.num_open)
        self._intakes.set(moment.num_free_intakes)
        self._bodies.set(moment.body_bytes)
        self._count_jobs(list(moment.jobs), moment.fleet)
        return generate_latest(self._registry)

    def _count_jobs(self, jobs: list[JobMoment], fleet: Fleet) -> None:
        tally = Tally((job.model, job.tenant_class, job.state) for job in jobs)
        now_s = asyncio.get_running_loop().time()
        self._jobs.clear()
        for model in {*fleet.statuses, *(job.model for job in jobs)}:
            for name in TENANT_CLASSES:
                for state in JOB_STATES:
                    self._jobs.labels(model, name, state).set(tally[model, name, state])
        for name in TENANT_CLASSES:
            waits = [now_s - job.since_s for job in jobs if (job.tenant_class, job.state) == (name, "queued")]
            self._oldest.labels(name).set(max(waits, default=0.0))
