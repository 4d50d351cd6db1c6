"""The rows as a table, a JSON file and a picture."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from bench.queue.rows import Row

_MARKS = {True: "yes", False: "NO", None: "-"}


def table(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = ["| | measured | goal | met |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.value} | {row.goal} | {_MARKS[row.is_met]} |" for row in rows]
    return "\n".join(lines)


def write_json(rows: list[Row], path: Path, load_before: tuple[float, float, float]) -> None:
    """All numbers, with what is known of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpus": os.cpu_count(), "processor": _processor(), "python": platform.python_version(),
            "load_before": load_before, "load_after": os.getloadavg(),
        },
        "rows": [
            {"name": row.name, "value": row.value, "goal": row.goal, "met": row.is_met, **_rounded(row.details)}
            for row in rows
        ],
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def draw(rows: list[Row], path: Path) -> None:
    """One picture with a panel for each kind of measurement that was made. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = [(draws, row) for row in rows for key, draws in _PANELS.items() if key in row.details]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False, layout="constrained")
    for (draws, row), axis in zip(panels, axes[0], strict=True):
        draws(axis, row.details)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _latency(axis: Any, details: dict[str, Any]) -> None:
    for name, key in (("gateway", "gateway_ms"), ("bare aiohttp", "bare_ms")):
        values = details[key]
        axis.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)
    axis.set(xscale="log", xlabel="ms to the first byte", ylabel="share of requests", title="Latency at 200 requests/s")
    axis.legend()


def _streams(axis: Any, details: dict[str, Any]) -> None:
    names = {"gateway": "gateway", "bare": "bare,\n1 a write", "bare_joined": "bare,\n16 a write"}
    axis.bar(list(names.values()), [details[key]["per_s"] for key in names], color=["C0", "C1", "C2"])
    axis.set(yscale="log", ylabel="tokens/s", title="64 streams through one process")


def _flood(axis: Any, details: dict[str, Any]) -> None:
    for name, key in (("alone", "solo_ms"), ("beside a flood", "beside_ms")):
        values = sorted(details[key])
        axis.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)
    axis.set(xlabel="ms to the first token", ylabel="share of requests", title="A quiet tenant")
    axis.legend()


def _scale(axis: Any, details: dict[str, Any]) -> None:
    counts = [point["workers"] for point in details["points"]]
    axis.plot(counts, [details["per_worker"] * count for count in counts], "--", color="gray", label="linear")
    axis.plot(counts, [point["tokens_per_s"] for point in details["points"]], "o-", label="measured")
    axis.set(
        xscale="log",
        yscale="log",
        xticks=counts,
        xticklabels=counts,
        xlabel="workers",
        ylabel="tokens/s",
        title="Scale",
    )
    axis.legend()


def _routing(axis: Any, details: dict[str, Any]) -> None:
    shares = [details[key]["hits"] for key in ("routing_on", "routing_off")]
    axis.bar(["routed", "to whoever asks"], shares, color=["C0", "C1"])
    axis.set(ylim=(0, 1), ylabel="share of later turns", title="Turns that find their prefix")


_PANELS = {
    "gateway_ms": _latency, "bare_joined": _streams, "beside_ms": _flood, "routing_on": _routing, "points": _scale,
}  # fmt: skip


def _rounded(value: Any) -> Any:
    """Thousandths are enough for whoever reads it."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
