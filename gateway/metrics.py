"""What /metrics tells. Labels are routes, statuses, models and workers; never a tenant: it would tell tenants about each other."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.model_directory import Fleet
from protocol.model_card import WorkerStatus

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LABELS = ("model", "worker")
_GAUGES = {
    "running_sequences": "Sequences in the worker's running batch.",
    "waiting_sequences": "Sequences that the worker holds back.",
    "max_sequences": "Largest running batch.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens taken in.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "engine_steps": "Engine steps.",
    "preemptions": "Sequences whose pages were taken for others.",
    "failed_requests": "Requests that ended with an error.",
    "integrity_violations": "Pages that failed an integrity check.",
}


class _FleetCollector(Collector):
    """The workers' own numbers, as they published them."""

    def __init__(self) -> None:
        self.fleet = Fleet()

    def collect(self) -> Iterator[Metric]:
        statuses = [status for found in self.fleet.statuses.values() for status in found]
        pages = GaugeMetricFamily(
            "sluicegate_worker_pages", "KV pages by state; held ones belong to sequences.", labels=[*_LABELS, "state"]
        )
        for status in statuses:
            for state, count in _pages(status).items():
                pages.add_metric([status.model, status.worker_id, state], count)
        yield pages
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"sluicegate_worker_{name}", text, labels=_LABELS)
            for status in statuses:
                gauge.add_metric([status.model, status.worker_id], getattr(status, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"sluicegate_worker_{name}", text, labels=_LABELS)
            for status in statuses:
                counter.add_metric([status.model, status.worker_id], getattr(status, name))
            yield counter


def _pages(status: WorkerStatus) -> dict[str, int]:
    held = status.pages_total - status.pages_free - status.pages_cached
    return {"total": status.pages_total, "free": status.pages_free, "cached": status.pages_cached, "held": held}


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
            "sluicegate_time_to_first_token_seconds", "From the checked request to its first token.",
            buckets=_TTFT_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._itl = Histogram(
            "sluicegate_inter_token_seconds",
            "Between two writes of a stream.",
            buckets=_ITL_BUCKETS,
            registry=self._registry,
        )
        self._open = Gauge("sluicegate_open_requests", "Requests being answered.", registry=self._registry)
        self._redis = Gauge("sluicegate_redis_up", "Whether Redis answers.", registry=self._registry)
        self._fleet = _FleetCollector()
        self._registry.register(self._fleet)

    def request(self, route: str, status: int) -> None:
        """A request has ended."""
        self._requests.labels(route, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """A request's first token has come."""
        self._ttft.observe(seconds)

    def between_tokens(self, seconds: float) -> None:
        """A stream's next write has come."""
        self._itl.observe(seconds)

    def render(self, fleet: Fleet, is_redis_up: bool, num_open: int) -> bytes:
        """The text of /metrics."""
        self._fleet.fleet = fleet
        self._redis.set(int(is_redis_up))
        self._open.set(num_open)
        return generate_latest(self._registry)
