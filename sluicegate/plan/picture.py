"""The memory of one GPU as a picture: what isn't used, weights by group, KV. Needs matplotlib, which the product does not."""

from pathlib import Path

from sluicegate.errors import CommandError
from sluicegate.plan.capacity import Plan, gib
from sluicegate.plan.cards import GIB
from sluicegate.plan.parts import GROUPS

_COLOURS = (
    "#264653",
    "#2a6f77",
    "#2a9d8f",
    "#57b894",
    "#0b6e4f",
    "#8ab17d",
    "#babb74",
    "#b0b7c3",
    "#5c677d",
    "#33415c",
)
_KV, _REST, _MISSING = "#e9c46a", "#dfe3ea", "#c0392b"


def segments(plan: Plan) -> list[tuple[str, float, str]]:
    """Label, bytes and colour of each piece of one GPU's memory, from its beginning. What is missing comes last and lies beyond its end."""
    colours = dict(zip(GROUPS, _COLOURS, strict=True))
    pieces = [(group, plan.weights_per_gpu[group], colours[group]) for group in GROUPS if group in plan.weights_per_gpu]
    missing = plan.missing_bytes_per_gpu
    if plan.pool_bytes > 0:
        pieces.append((f"KV cache, {plan.tokens_per_group:,} tokens", plan.pool_bytes, _KV))
    if missing:
        pieces.append(("missing", missing, _MISSING))
    else:
        pieces.append(("kept free", plan.card.memory_bytes - plan.usable_bytes, _REST))
    return pieces


def draw(plan: Plan, path: Path) -> None:
    """Write a picture in the format that the file's ending names. Raises CommandError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError("--picture needs matplotlib: pip install 'sluicegate[bench]'") from None
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots()
    start = 0.0
    for label, size, colour in segments(plan):
        axes.barh(
            0, size / GIB, left=start / GIB, color=colour, height=0.6, edgecolor="white", label=f"{label}: {gib(size)}"
        )
        start += size
    axes.axvline(plan.card.memory_bytes / GIB, color="#222222", linewidth=1.2)
    axes.axvline(plan.usable_bytes / GIB, color="#222222", linewidth=0.8, linestyle="--")
    axes.set_yticks([])
    axes.set_ylim(-0.45, 0.45)
    axes.set_xlim(0, max(start, plan.card.memory_bytes) / GIB * 1.01)
    axes.set_xlabel(f"GiB of one {plan.card.title}; dashed: {plan.memory_fraction:g} of it, for weights and KV")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"{plan.shape.name} on {plan.count} x {plan.card.name}, tp {plan.tp}, weights {plan.policy.name}, KV {plan.kv_format}",
        loc="left",
        fontsize=11,
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"--picture {path}: {error}") from None
