"""What a run found, as plain data: this is the JSON file, and what tables, picture and goals are made from."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Cell:
    """One engine's samples of one row, in tokens a second; with `error` set there are none, for that reason."""

    samples: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float | None:
        """None without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> float:
        """Half of the range between the quartiles, as a share of the median."""
        if len(self.samples) < 2 or self.median is None:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2 / self.median


@dataclass(slots=True)
class EngineResult:
    """One engine: how it was set up, its memory in bytes, its rows by name."""

    name: str
    title: str
    about: dict[str, str] = field(default_factory=dict)
    unavailable: str | None = None
    ready_s: float | None = None
    memory: dict[str, int] = field(default_factory=dict)  # after the first row
    peak_bytes: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)  # ours only
    same_tokens: int | None = None  # of the first row's, as many from the start as our bf16 engine has too
    rows: dict[str, Cell] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerResult:
    """Real `sluicegate worker` processes: seconds from their start until they're ready, and their memory then."""

    ready_s: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    peak_bytes: int = 0
    torch_bytes: int = 0  # a Python process that has imported torch
    kv_bytes: int = 0  # of the pool that it has made
    error: str | None = None


@dataclass(slots=True)
class Row:
    """A row's definition, as measured."""

    name: str
    title: str
    num_streams: int
    context: int
    num_steps: int
    rounds: int


@dataclass(slots=True)
class Results:
    """A whole run. `bandwidth` are samples in bytes a second, taken between the rows."""

    started: str
    machine: dict[str, str]
    model: str
    weight_bytes: int = 0
    wall_s: float = 0.0
    others_share: float | None = None  # of all cores' time, what other processes had during the run
    bandwidth: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    engines: list[EngineResult] = field(default_factory=list)
    worker: WorkerResult | None = None
    goals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def floor_s(self) -> float | None:
        """Seconds in which all weights are read once, at the median bandwidth of the run."""
        if not self.bandwidth or not self.weight_bytes:
            return None
        return self.weight_bytes / statistics.median(self.bandwidth)

    def engine(self, name: str) -> EngineResult | None:
        """An engine by its name."""
        return next((engine for engine in self.engines if engine.name == name), None)

    def rate(self, engine: str, row: str) -> float | None:
        """Median tokens a second, if measured."""
        found = self.engine(engine)
        cell = found.rows.get(row) if found else None
        return cell.median if cell else None

    def best_rate(self, name: str, row: str) -> float | None:
        """That of an engine, or of the fastest of its variants in this row."""
        variants = [engine.name for engine in self.engines if engine.name == name or engine.name.startswith(f"{name}-")]
        return max((rate for variant in variants if (rate := self.rate(variant, row))), default=None)

    def as_json(self) -> dict[str, Any]:
        """Everything, with medians and spreads beside the samples."""
        document = asdict(self)
        document["floor_tokens_per_s"] = 1 / self.floor_s if self.floor_s else None
        for engine, entry in zip(self.engines, document["engines"], strict=True):
            for name, cell in engine.rows.items():
                entry["rows"][name] |= {"median": cell.median, "spread": cell.spread}
        return document
