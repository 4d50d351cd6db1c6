"""A whole run of the engine's benchmark, from arguments to files."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench import contenders, float_weights, goals, table
from bench.measure import Plan, measure
from bench.neighbours import CpuTimes
from bench.prompts import PromptSource, token_ids
from bench.results import Results
from bench.rows import SETS, Row, longest, most_streams, most_tokens
from bench.start import Queue, measure_worker
from worker.quantize.texts import evaluation_text


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to measure. `peers` is the folder of peers, or None for our engine alone; `queue` None skips real workers."""

    model_name: str
    model: Path
    rows: tuple[Row, ...]
    peers: Path | None
    only: frozenset[str]
    out: Path
    name: str
    queue: Queue | None
    num_starts: int = 3
    say: Callable[[str], None] = print


def chosen_rows(name: str, rounds: int | None) -> tuple[Row, ...]:
    """A set of rows, with another number of rounds if wanted."""
    rows = SETS[name]
    return rows if rounds is None else tuple(replace(row, rounds=rounds) for row in rows)


def run(options: RunOptions) -> Results:
    """Measure, write NAME.json, NAME.md and NAME.png (if matplotlib is here) into the folder, and return what was found."""
    options.out.mkdir(parents=True, exist_ok=True)
    logs = options.out / "logs"
    logs.mkdir(exist_ok=True)
    before = CpuTimes.now()
    results = Results(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), machine(), options.model_name)
    threads = len(os.sched_getaffinity(0))
    folder = options.peers or contenders.DEFAULT_PEERS
    plan = Plan(
        model=options.model,
        rows=options.rows,
        contenders=_contenders(options),
        threads=threads,
        logs=logs,
        folder_for=lambda dtype: float_weights.write_folder(
            options.model, folder / f"{options.model.stem}-{dtype}", dtype
        ),
        say=options.say,
    )
    measure(plan, PromptSource(token_ids(options.model, evaluation_text())), results)
    if options.queue is not None:
        options.say("starts of `sluicegate worker`")
        results.worker = measure_worker(options.queue, ("--model", str(options.model)), options.num_starts)
    results.goals = goals.judged(results)
    after = CpuTimes.now()
    results.wall_s = after.at_s - before.at_s
    results.others_share = after.share_of_others(before, os.cpu_count() or 1)
    write(results, options.out, options.name, options.say)
    return results


def write(results: Results, folder: Path, name: str, say: Callable[[str], None]) -> None:
    """The files of a run."""
    (folder / f"{name}.json").write_text(json.dumps(results.as_json(), indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table.markdown(results), encoding="utf-8")
    try:
        from bench.picture import draw

        draw(results, folder / f"{name}.png")
    except ImportError:
        say("no picture: matplotlib is not installed (pip install 'sluicegate[bench]')")


def machine() -> dict[str, str]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    flags = values.get("flags", "").split()
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if flag in flags]
    return {
        "processor": values.get("model name", "an unknown processor"),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "instructions": " ".join(known) or "no vector instructions known",
    }


def _contenders(options: RunOptions) -> tuple[contenders.Contender, ...]:
    kv_tokens = max(most_tokens(options.rows), longest(options.rows)) + 16 * most_streams(options.rows)
    everybody = contenders.ours(kv_tokens)
    if options.peers is not None:
        everybody += contenders.peers(options.peers)
    if options.only:
        return tuple(one for one in everybody if one.name in options.only)
    # In a run with peers, two KV formats of ours are enough: each costs a minute and more.
    return tuple(one for one in everybody if options.peers is None or one.name != contenders.OURS_BF16)
