"""A run as a picture: each row's rates as bars, one panel a row. Needs matplotlib, which the product does not."""

from pathlib import Path
from typing import TYPE_CHECKING

from bench.contenders import OURS
from bench.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
_OURS_COLOURS = ("#0b6e4f", "#73c2a4", "#b9dfd0")
_PEER_COLOURS = ("#b0b7c3", "#7c8799", "#4d5666", "#c9a66b")


def draw(results: Results, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    num_lines = -(-len(results.rows) // COLUMNS)
    figure, panels = plt.subplots(
        num_lines, COLUMNS, figsize=(16, 3.2 * num_lines + 0.8), squeeze=False, layout="constrained"
    )
    for number, panel in enumerate(panels.flat):
        if number >= len(results.rows):
            panel.axis("off")
            continue
        row = results.rows[number]
        panel.set_title(row.title, fontsize=9, loc="left")
        for spine in ("top", "right", "left"):
            panel.spines[spine].set_visible(False)
        panel.set_xticks([])
        top = _bars(panel, results, row.name, named=number % COLUMNS == 0)
        if row.num_streams == 1 and row.num_steps and results.floor_s:
            top = max(top, 1 / results.floor_s)
            panel.axvline(1 / results.floor_s, color="#c0392b", linewidth=1, linestyle="--")
            panel.text(
                1 / results.floor_s, len(results.engines) - 0.6, "floor ", color="#c0392b", fontsize=8, ha="right"
            )
        panel.set_xlim(0, (top or 1.0) * 1.25)
    figure.suptitle(f"{results.model}: tokens a second ({results.started})", x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(panel: "Axes", results: Results, row: str, *, named: bool) -> float:
    """One bar for each engine, in the table's order from the top; samples as strokes on it, so that the spread is seen. Returns the highest rate."""
    mine, theirs = iter(_OURS_COLOURS), iter(_PEER_COLOURS)
    names, top = [], 0.0
    for position, engine in enumerate(results.engines):
        colour = next(mine if engine.name.startswith(OURS) else theirs, "#999999")
        cell = engine.rows.get(row)
        rate = (cell.median if cell else None) or 0.0
        samples = cell.samples if cell else []
        panel.barh(position, rate, color=colour, height=0.7)
        panel.plot(samples, [position] * len(samples), "|", color="#222222", markersize=7, alpha=0.6)
        panel.text(max([rate, *samples]), position, f"  {rate:.0f}" if rate else "  -", va="center", fontsize=8)
        names.append(engine.title)
        top = max(top, rate, *samples)
    panel.set_yticks(range(len(names)), names if named else [""] * len(names), fontsize=8)
    panel.invert_yaxis()
    return top
