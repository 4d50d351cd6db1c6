"""The workers' own numbers for /metrics, as they published them. Label values are models and workers that exist or existed a moment ago."""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.model_directory import Fleet
from protocol.ids import ModelName, WorkerId
from protocol.model_card import BATCH_SIZE_BOUNDS, WorkerStatus

_LABELS = ("model", "worker")
# A worker that has gone is shown as down for so long, and no more than so many of them.
GONE_S = 300.0
MAX_GONE = 64
MAX_INTEGRITY_COUNTS = 32
VIOLATION_KINDS = ("lease", "read", "prefix", "scrub")
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


class FleetCollector(Collector):
    """Made from the picture of the fleet; remembers workers that have gone."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._seen_s: dict[tuple[ModelName, WorkerId], float] = {}

    def show(self, fleet: Fleet) -> None:
        """The picture to collect from."""
        now_s = time.monotonic()
        self._fleet = fleet
        live = {(model, worker) for model, workers in fleet.live.items() for worker in workers}
        self._seen_s.update(dict.fromkeys(live, now_s))
        gone = [key for key in self._seen_s if key not in live]
        newest = sorted(gone, key=lambda key: self._seen_s[key])[-MAX_GONE:]
        kept = live | {key for key in newest if now_s - self._seen_s[key] < GONE_S}
        self._seen_s = {key: seen_s for key, seen_s in self._seen_s.items() if key in kept}

    def collect(self) -> Iterator[Metric]:
        """All families."""
        statuses = [status for found in self._fleet.statuses.values() for status in found]
        yield self._liveness(statuses)
        yield _pages(statuses)
        yield _batches(statuses)
        yield _integrity(statuses)
        yield _violations(statuses)
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

    def _liveness(self, statuses: list[WorkerStatus]) -> Metric:
        text = "1 while a worker's engine makes progress, 0 when it was lost or left, 0.5 while it drains."
        up = GaugeMetricFamily("sluicegate_worker_up", text, labels=_LABELS)
        draining = {(status.model, status.worker_id) for status in statuses if status.is_draining}
        for model, worker in sorted(self._seen_s):
            is_live = worker in self._fleet.live_workers(model)
            up.add_metric([model, worker], 0 if not is_live else 0.5 if (model, worker) in draining else 1)
        return up


def _pages(statuses: list[WorkerStatus]) -> Metric:
    text = "KV pages by state; held ones belong to sequences."
    pages = GaugeMetricFamily("sluicegate_worker_pages", text, labels=[*_LABELS, "state"])
    for status in statuses:
        held = status.pages_total - status.pages_free - status.pages_cached
        states = {"total": status.pages_total, "free": status.pages_free, "cached": status.pages_cached, "held": held}
        for state, count in states.items():
            pages.add_metric([status.model, status.worker_id, state], count)
    return pages


def _integrity(statuses: list[WorkerStatus]) -> Metric:
    text = "What the integrity checks of the KV cache have found and done."
    family = CounterMetricFamily("sluicegate_worker_integrity", text, labels=[*_LABELS, "count"])
    for status in statuses:
        for name, count in status.integrity[:MAX_INTEGRITY_COUNTS]:
            family.add_metric([status.model, status.worker_id, name[:64]], count)
    return family


def _violations(statuses: list[WorkerStatus]) -> Metric:
    text = "Pages that failed a check, by how that was noticed and the worker's mode."
    family = CounterMetricFamily("sluicegate_integrity_violations", text, labels=[*_LABELS, "kind", "mode"])
    for status in statuses:
        counts = dict(status.integrity[:MAX_INTEGRITY_COUNTS])
        for kind in VIOLATION_KINDS:
            labels = [status.model, status.worker_id, kind, status.integrity_mode[:16]]
            family.add_metric(labels, counts.get(f"violations_{kind}", 0))
    return family


def _batches(statuses: list[WorkerStatus]) -> Metric:
    histogram = HistogramMetricFamily("sluicegate_worker_batch_size", "Sequences in an engine step.", labels=_LABELS)
    names = [*(f"{float(bound)}" for bound in BATCH_SIZE_BOUNDS), "+Inf"]
    for status in statuses:
        counts = list(status.batch_sizes) or [0] * len(names)
        buckets = [(name, float(sum(counts[: index + 1]))) for index, name in enumerate(names)]
        histogram.add_metric([status.model, status.worker_id], buckets, status.batched_sequences)
    return histogram
