"""The goals that the engine is held to, each with the number that decides it."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.contenders import OURS, OURS_8_BITS, OURS_FP8
from bench.results import Results

REACHED, MISSED, UNKNOWN = "reached", "missed", "not measured"


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` computes the number from a run, or None; `limit` is the least it may be, or the most if `is_most`."""

    title: str
    limit: float
    value: Callable[[Results], float | None]
    unit: str = "x"
    is_most: bool = False

    def judge(self, results: Results) -> dict[str, Any]:
        """A row of the table of goals."""
        value = self.value(results)
        state = UNKNOWN
        if value is not None:
            state = REACHED if (value <= self.limit if self.is_most else value >= self.limit) else MISSED
        bound = f"at {'most' if self.is_most else 'least'} {self.limit:g}{self.unit}"
        shown = "-" if value is None else f"{value:.2f}{self.unit}"
        return {"goal": self.title, "bound": bound, "limit": self.limit, "value": value, "shown": shown, "state": state}


def judged(results: Results) -> list[dict[str, Any]]:
    """All goals."""
    return [goal.judge(results) for goal in GOALS]


def _ratio(row: str, peer: str, engine: str = OURS) -> Callable[[Results], float | None]:
    """How many times a peer's rate ours is, with our defaults unless told otherwise."""

    def value(results: Results) -> float | None:
        ours, theirs = results.rate(engine, row), results.best_rate(peer, row)
        return ours / theirs if ours and theirs else None

    return value


def _of_floor(row: str) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        rate = results.rate(OURS, row)
        return 100 * rate * results.floor_s if rate and results.floor_s else None

    return value


def _times_as_long(engine: str, row: str, than: str) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        rate, base = results.rate(engine, row), results.rate(engine, than)
        return base / rate if rate and base else None

    return value


def _ready_s(results: Results) -> float | None:
    return median(results.worker.ready_s) if results.worker and results.worker.ready_s else None


def _worker_memory(results: Results) -> float | None:
    """Resident bytes of a ready worker without torch's own, over weights and KV pool."""
    worker = results.worker
    if worker is None or not worker.resident_bytes or not results.weight_bytes:
        return None
    return (worker.resident_bytes - worker.torch_bytes) / (results.weight_bytes + worker.kv_bytes)


def _touched_memory(results: Results) -> float | None:
    """The same of our engine's process with every byte of the pool touched, after the first row."""
    ours = results.engine(OURS)
    if ours is None or not ours.memory or not ours.sizes or not results.worker:
        return None
    return (ours.memory["resident"] - results.worker.torch_bytes) / (ours.sizes["weights"] + ours.sizes["kv"])


def _worker_peak(results: Results) -> float | None:
    """The most that a worker held until it was ready, the mapped file included, without torch's own, over weights and KV pool."""
    worker = results.worker
    if worker is None or not worker.peak_bytes or not results.weight_bytes:
        return None
    return (worker.peak_bytes - worker.torch_bytes) / (results.weight_bytes + worker.kv_bytes)


def _loading(results: Results) -> float | None:
    """What the process held at most while it loaded, over the weights alone; the mapped file isn't counted."""
    ours = results.engine(OURS)
    if ours is None or not ours.sizes:
        return None
    return (ours.sizes["peak_of_loading"] - ours.sizes["before_loading"]) / ours.sizes["weights"]


GOALS = (
    Goal("decode, 1 stream at 512, over llama.cpp", 2, _ratio("decode-1x512", "llama.cpp")),
    Goal("decode, 1 stream at 512, of the bandwidth floor", 60, _of_floor("decode-1x512"), "%"),
    *(Goal(f"decode, {n} streams, over llama.cpp", 3, _ratio(f"decode-{n}x128", "llama.cpp")) for n in (8, 16, 32)),
    *(Goal(f"decode, {n} streams, over vLLM", 4, _ratio(f"decode-{n}x128", "vllm")) for n in (8, 16, 32)),
    *(Goal(f"prefill of {n:,}, over OpenVINO", 1.1, _ratio(f"prefill-{n}", "openvino")) for n in (512, 2048)),
    *(
        Goal(
            f"prefill of {n:,} with 8-bit activations, as OpenVINO computes, over OpenVINO", 1.1,
            _ratio(f"prefill-{n}", "openvino", OURS_8_BITS),
        )
        for n in (512, 2048)
    ),
    *(Goal(f"prefill of {n:,}, over llama.cpp", 4, _ratio(f"prefill-{n}", "llama.cpp")) for n in (512, 2048)),
    Goal(
        "a decode step at 8,000 tokens over one at 512, FP8 KV", 2,
        _times_as_long(OURS_FP8, "decode-1x8000", "decode-1x512"), is_most=True,
    ),
    Goal(
        "a token of a prefill of 2,048 over one of 512 (near-linear)", 1.25,
        _times_as_long(OURS, "prefill-2048", "prefill-512"), is_most=True,
    ),
    Goal("a ready worker's memory, less torch's, over weights and KV pool", 1.3, _worker_memory, is_most=True),
    Goal("the engine's memory, less torch's, over the same, all touched", 1.3, _touched_memory, is_most=True),
    Goal("a worker's peak until ready, less torch's, over weights and KV pool", 1.5, _worker_peak, is_most=True),
    Goal("memory taken while loading, its peak over the weights alone", 1.5, _loading, is_most=True),
    Goal("`sluicegate worker` to ready, warm file cache", 6, _ready_s, " s", is_most=True),
)  # fmt: skip


def slower_than_a_peer(results: Results) -> list[str]:
    """Rows in which some peer is faster than the best of our KV formats."""
    found = []
    for row in results.rows:
        ours = results.best_rate(OURS, row.name)
        for engine in results.engines:
            theirs = results.rate(engine.name, row.name)
            if not engine.name.startswith(OURS) and ours and theirs and theirs > ours:
                found.append(f"{row.title}: {engine.title} is {theirs / ours:.2f} times as fast")
    return found


def summary(judgements: list[dict[str, Any]]) -> dict[str, int]:
    """How many goals are in each state."""
    return {state: sum(entry["state"] == state for entry in judgements) for state in (REACHED, MISSED, UNKNOWN)}
