"""A run over scripted engines: turns, warm-up, and what becomes of engines that fail."""

import sys
from pathlib import Path

from bench.contenders import Contender
from bench.goals import judged
from bench.measure import Plan, measure
from bench.prompts import PromptSource
from bench.results import Results
from bench.rows import TINY_ROWS
from bench.table import markdown

SCRIPT = str(Path(__file__).with_name("scripted_engine.py"))


def contender(mode: str) -> Contender:
    """The scripted engine in a mode, as a peer."""
    return Contender(mode.replace(" ", "-"), mode, (sys.executable, SCRIPT, mode))


def run(tmp_path: Path, *contenders: Contender) -> Results:
    """The tiny rows."""
    results = Results("now", {}, "m")
    plan = Plan(tmp_path / "m", TINY_ROWS, contenders, 1, tmp_path, lambda _: tmp_path, lambda _: None)
    measure(plan, PromptSource(list(range(1000))), results)
    return results


def test_every_engine_has_every_row(tmp_path: Path) -> None:
    """As many samples as rounds."""
    results = run(tmp_path, contender("works"))

    cells = results.engines[0].rows

    assert {row.name: row.rounds for row in TINY_ROWS} == {name: len(cell.samples) for name, cell in cells.items()}
    assert all(sample > 0 for cell in cells.values() for sample in cell.samples)


def test_engines_that_fail_are_in_the_table_with_the_reason(tmp_path: Path) -> None:
    """One that does not load, one that dies, one that isn't there, one that stops in its first steps; the other goes on."""
    absent = Contender("absent", "absent", unavailable="cannot be installed: no wheel")
    results = run(tmp_path, contender("no load"), contender("dies"), absent, contender("no step"), contender("works"))
    table = markdown(results)

    for reason in ("out of luck", "terrible things", "no wheel", "no more"):
        assert reason in table
    assert [True, True, True, True, False] == [engine.unavailable is not None for engine in results.engines]
    assert 3 == len(results.engines[-1].rows)


def test_nothing_is_judged_without_our_engine(tmp_path: Path) -> None:
    """A goal without its figures is neither reached nor missed."""
    assert {"not measured"} == {goal["state"] for goal in judged(run(tmp_path, contender("works")))}
