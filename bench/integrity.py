"""What the integrity modes cost: the same decode steps in every mode, in turns, so that a noisy moment meets all of them."""

import copy
import json
import secrets
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kernels.backend import Backend, resolve
from kernels.kv_pool import KvPool
from protocol.ids import GatewayId, ModelName, RequestId, TenantId, WorkerId
from protocol.job import Job, SamplingParams
from worker.cache.namespace import NamespaceRing
from worker.engine import Engine, EngineParts
from worker.model.load import LoadedModel, load_model
from worker.model.token_bytes import token_bytes
from worker.model_executor import ModelExecutor

MODES = ("off", "lease", "seal", "full")
ROWS = ((1, 512), (1, 4000), (16, 128))
PAGE_SIZE = 16
STEPS_A_TURN = 4
STEP_TOKENS = 256
NUM_RESAMPLED = 1000
FAR_MS = 2**60


@dataclass(frozen=True, slots=True)
class Cost:
    """Median time of a decode step in each mode, and of the pairwise ratios to `off`, with the standard error of that median."""

    num_streams: int
    context: int
    step_ms: dict[str, float]
    ratio: dict[str, float]
    error: dict[str, float]


def new_engine(loaded: LoadedModel, kv: KvPool, backend: Backend, mode: str) -> Engine:
    """An engine over a pool, in one mode."""
    parts = EngineParts(
        executor=ModelExecutor(loaded.model, kv, backend, checks_reads=mode == "full"),
        namespaces=NamespaceRing(b"b" * 32, loaded.digest, "fp16"),
        token_bytes=tuple(token_bytes(loaded.tokenizer)),
        eos_token_ids=frozenset(loaded.tokenizer.eos_token_ids),
        max_request_tokens=kv.layout.num_pages * PAGE_SIZE,
        worker_id=WorkerId("bench"),
        checks_leases=mode != "off",
        now=time.monotonic,
        now_ms=lambda: 0,
    )
    return Engine(parts, 16, STEP_TOKENS)


class _Side:
    """An engine in one mode. All of them share the weights, so that no mode's lie luckier in memory."""

    def __init__(self, mode: str, loaded: LoadedModel, num_pages: int, backend: Backend) -> None:
        self.mode = mode
        self._backend = backend
        # Recorded passes belong to one pool, so each side keeps its own.
        self._loaded = replace(loaded, model=copy.copy(loaded.model))
        has_seals = mode in {"seal", "full"}
        layout = loaded.kv_layout(num_pages, PAGE_SIZE, "fp16")
        self._kv = KvPool.allocate(layout, seal_secret=secrets.token_bytes(32) if has_seals else None)
        self.begin(0, 0, 0)

    def begin(self, num_streams: int, context: int, num_new: int) -> None:
        """A fresh engine whose prompts are computed."""
        self._engine = new_engine(self._loaded, self._kv, self._backend, self.mode)
        sampling = SamplingParams(max_tokens=num_new, seed=0, temperature=0.0, ignore_eos=True)
        for number in range(num_streams):
            ids = tuple(int(t) for t in np.random.default_rng(number).integers(100, 40_000, context))
            job = Job(RequestId(str(number)), GatewayId("g"), TenantId("t"), ModelName("m"), ids, sampling, 0, FAR_MS)
            self._engine.submit(job)
        while (
            any(s.num_remaining > 1 for s in self._engine.scheduler.running)
            or self._engine.totals.steps == 0 < num_streams
        ):
            self._engine.step()

    def turn(self) -> float:
        """Seconds of a step, over a few."""
        started_s = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            self._engine.step()
        return (time.perf_counter() - started_s) / STEPS_A_TURN


def measure(model: Path, num_turns: int) -> list[Cost]:
    """All rows, all modes."""
    backend = resolve("cpu")
    num_new = STEPS_A_TURN * (num_turns + 2) + 8
    num_pages = max(streams * -(-(context + num_new) // PAGE_SIZE) for streams, context in ROWS)
    loaded = load_model(model, backend)
    sides = [_Side(mode, loaded, num_pages, backend) for mode in MODES]
    return [_cost(sides, num_streams, context, num_turns, num_new) for num_streams, context in ROWS]


def _cost(sides: list[_Side], num_streams: int, context: int, num_turns: int, num_new: int) -> Cost:
    for side in sides:
        side.begin(num_streams, context, num_new)
        side.turn()
    turns: dict[str, list[float]] = {mode: [] for mode in MODES}
    rng = np.random.default_rng(0)
    for _ in range(num_turns):
        for place in rng.permutation(len(sides)):
            turns[sides[place].mode].append(sides[place].turn())
    ratios = {mode: np.array(turns[mode]) / np.array(turns["off"]) for mode in MODES}
    step_ms = {mode: statistics.median(seconds) * 1e3 for mode, seconds in turns.items()}
    medians = {mode: float(np.median(values)) for mode, values in ratios.items()}
    errors = {
        mode: float(np.median(rng.choice(values, (NUM_RESAMPLED, len(values))), axis=1).std())
        for mode, values in ratios.items()
    }
    return Cost(num_streams, context, step_ms, medians, errors)


def table(costs: list[Cost]) -> str:
    """Milliseconds a step without checks, and what each mode adds, in percent, with its standard error."""
    lines = ["| decode | off, ms a step | lease | seal | full |", "|---|---|---|---|---|"]
    for cost in costs:
        added = " | ".join(f"{(cost.ratio[mode] - 1) * 100:+.1f}% ± {cost.error[mode] * 100:.1f}" for mode in MODES[1:])
        streams = "1 stream" if cost.num_streams == 1 else f"{cost.num_streams} streams"
        lines.append(f"| {streams} at {cost.context:,} | {cost.step_ms['off']:.2f} | {added} |")
    return "\n".join(lines)


def write(costs: list[Cost], folder: Path) -> None:
    """JSON and, if matplotlib is here, a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(cost) for cost in costs]
    (folder / "integrity.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "integrity.md").write_text(table(costs) + "\n")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for offset, mode in enumerate(MODES[1:]):
        places = [index + 0.25 * (offset - 1) for index in range(len(costs))]
        errors = [cost.error[mode] * 100 for cost in costs]
        axes.bar(places, [(cost.ratio[mode] - 1) * 100 for cost in costs], yerr=errors, width=0.22, label=mode)
    axes.set_xticks(range(len(costs)), [f"{cost.num_streams} x {cost.context:,}" for cost in costs])
    axes.set_xlabel("streams x tokens of context")
    axes.set_ylabel("added to a decode step, %")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend()
    figure.savefig(folder / "integrity.png", dpi=120)
