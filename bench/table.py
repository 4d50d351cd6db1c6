"""A run as Markdown: for the terminal, and as the file that people read."""

from collections.abc import Iterable, Sequence
from statistics import median

from bench.contenders import OURS
from bench.goals import slower_than_a_peer, summary
from bench.results import EngineResult, Results

MB = 1e6
BUSY_SHARE = 0.1
_SPREAD_SHOWN = 0.05


def markdown(results: Results) -> str:
    """The whole report."""
    parts = [_head(results), _rates(results), _ratios(results), _set_up(results), _memory(results), _goals(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _head(results: Results) -> str:
    machine = ", ".join(f"{value}" for value in results.machine.values())
    text = (
        f"# Benchmark of the engine\n\n{results.started}, {results.wall_s / 60:.1f} minutes. {results.model} on {machine}.\n\n"
        "Tokens a second, medians; ± is half the range between the quartiles, shown from 5% on. All engines took turns in each "
        "row, so that a noisy moment met all of them: compare within this table only."
    )
    lines = [text]
    if results.others_share is not None:
        shown = f"other processes had {100 * results.others_share:.0f}% of the cores' time during the run"
        lines.append(f"**Not a quiet machine: {shown}.**" if _is_busy(results) else f"{shown.capitalize()}.")
    if results.floor_s:
        bandwidth = median(results.bandwidth)
        low, high = min(results.bandwidth) / 1e9, max(results.bandwidth) / 1e9
        lines.append(
            f"Read bandwidth of all cores: {bandwidth / 1e9:.1f} GB/s ({low:.1f} to {high:.1f} in the run). Reading the "
            f"{results.weight_bytes / MB:.1f} MB of weights once takes {results.floor_s * 1e3:.2f} ms, so one stream decodes "
            f"at most {1 / results.floor_s:.0f} tokens a second: **the floor**."
        )
    return "\n\n".join(lines)


def _is_busy(results: Results) -> bool:
    return results.others_share is not None and results.others_share > BUSY_SHARE


def _rates(results: Results) -> str:
    head = ["", *(engine.title for engine in results.engines), "of the floor"]
    rows = []
    for row in results.rows:
        cells = [_cell(engine, row.name) for engine in results.engines]
        rate = results.rate(OURS, row.name)
        is_single = row.num_streams == 1 and row.num_steps > 0
        floor = f"{100 * rate * results.floor_s:.0f}%" if is_single and rate and results.floor_s else ""
        rows.append([row.title, *cells, floor])
    return table(head, rows)


def _cell(engine: EngineResult, row: str) -> str:
    if engine.unavailable:
        return "not run"
    cell = engine.rows.get(row)
    if cell is None or cell.median is None:
        return f"failed: {_plain(cell.error)[:80]}" if cell and cell.error else "-"
    shown = f"{cell.median:.0f}" if cell.median >= 100 else f"{cell.median:.1f}"
    return f"{shown} ±{100 * cell.spread:.0f}%" if cell.spread >= _SPREAD_SHOWN else shown


def _ratios(results: Results) -> str:
    ours = [engine for engine in results.engines if engine.name.startswith(OURS) and not engine.unavailable]
    others = [engine for engine in results.engines if not engine.name.startswith(OURS) and not engine.unavailable]
    if not ours or not others:
        return ""
    head = ["times as fast as", *(f"{peer.title} ({_short(mine)})" for peer in others for mine in ours)]
    rows = []
    for row in results.rows:
        ratios = [
            _ratio(results.rate(mine.name, row.name), results.rate(peer.name, row.name))
            for peer in others
            for mine in ours
        ]
        rows.append([row.title, *ratios])
    return "## Ours over each peer\n\n" + table(head, rows)


def _short(engine: EngineResult) -> str:
    """What tells one of our engines from the others."""
    return engine.title.partition(", ")[2] or engine.title


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def _set_up(results: Results) -> str:
    rows = []
    for engine in results.engines:
        about = engine.about
        if engine.unavailable:
            rows.append([engine.title, f"**not run**: {_plain(engine.unavailable)}", "", "", "", ""])
            continue
        same = "" if engine.same_tokens is None else str(engine.same_tokens)
        ready = "" if engine.ready_s is None else f"{engine.ready_s:.1f}"
        rows.append(
            [
                engine.title,
                *(_plain(about.get(key, "")) for key in ("version", "weights", "kv", "settings")),
                ready,
                same,
            ]
        )
    head = ["", "version", "weights", "KV cache", "settings", "process to ready, s", "same first tokens"]
    text = (
        "Same prompts (token ids of English prose), same number of tokens, greedy, no prefix cache, one process each, all cores. "
        "What is not the same is in this table. The last column: how many of the first stream's greedy tokens agree with ours from the "
        "start on; engines that round differently part at a near tie."
    )
    return f"## Set-up\n\n{text}\n\n{table(head, rows)}"


def _memory(results: Results) -> str:
    rows = []
    for engine in results.engines:
        if engine.memory:
            sizes = engine.sizes
            held = f"{sizes['weights'] / MB:.0f} + {sizes['kv'] / MB:.0f}" if sizes else ""
            numbers = (engine.memory["resident"], engine.memory["anonymous"], engine.peak_bytes or 0)
            rows.append([engine.title, *(f"{number / MB:.0f}" for number in numbers), held])
    head = ["MB", "resident after the first row", "of it not mapped from files", "peak of the run", "weights + KV pool"]
    parts = ["## Memory and start", table(head, rows)]
    if (worker := results.worker) is not None:
        parts.append(
            f"`sluicegate worker`: does not start: {_plain(worker.error)}" if worker.error else
            f"`sluicegate worker` from its start to ready: {median(worker.ready_s):.2f} s ({min(worker.ready_s):.2f} to "
            f"{max(worker.ready_s):.2f} of {len(worker.ready_s)}); resident then {worker.resident_bytes / MB:.0f} MB, peak "
            f"{worker.peak_bytes / MB:.0f} MB, KV pool {worker.kv_bytes / MB:.0f} MB (its untouched pages are not resident); a process "
            f"that has only imported torch: {worker.torch_bytes / MB:.0f} MB."
        )  # fmt: skip
    return "\n\n".join(parts)


def _goals(results: Results) -> str:
    if not results.goals:
        return ""
    counts = ", ".join(f"{count} {state}" for state, count in summary(results.goals).items())
    rows = [[goal["goal"], goal["bound"], goal["shown"], _emphasized(goal["state"])] for goal in results.goals]
    slower = slower_than_a_peer(results)
    lines = "\n".join(f"- {line}" for line in slower) or "- in none of the rows measured"
    doubt = "" if not _is_busy(results) else "**The machine was busy: what is said of speed here doesn't count.**\n\n"
    return (
        f"## Goals: {counts}\n\n{doubt}{table(['goal', 'bound', 'measured', ''], rows)}\n\n"
        f"Where a peer is faster than the best of our KV formats:\n\n{lines}"
    )


def _emphasized(state: str) -> str:
    return f"**{state}**" if state == "missed" else state


def _plain(text: str | None) -> str:
    """Without what would end a cell of a table."""
    return " ".join((text or "").replace("|", "/").split())
