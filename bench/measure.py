"""A run: all engines are loaded, then each row is measured in rounds in which every engine has its turn.

So a noisy moment of the machine meets all of them. Only one engine computes at a time; the others wait for input.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import OURS, Contender
from bench.process import EngineError, EngineProcess
from bench.prompts import PromptSource
from bench.results import Cell, EngineResult, Results
from bench.results import Row as RowRecord
from bench.rows import Row, longest, most_streams

LOAD_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 900.0
# Threads of the engine before may still spin for a moment when they have run out of work.
SETTLE_S = 0.1


@dataclass(slots=True)
class Runner:
    """An engine that takes part, with its process while that lives."""

    contender: Contender
    result: EngineResult
    process: EngineProcess | None = None

    def ask(self, row: str, **request: Any) -> dict[str, Any] | None:
        """An answer, or None after noting why there is none; an engine that has failed in a row sits out the rest of it."""
        if self.process is None or (cell := self.cell(row)).error:
            return None
        time.sleep(SETTLE_S)
        try:
            return self.process.ask(TURN_TIMEOUT_S, **request)
        except EngineError as error:
            cell.error = str(error)
            with contextlib.suppress(EngineError):
                self.process.ask(TURN_TIMEOUT_S, op="end")
            return None

    def cell(self, row: str) -> Cell:
        """The engine's place in a row."""
        return self.result.rows.setdefault(row, Cell())


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to do. `folder_for` gives the model as a folder in some precision, for engines that need one."""

    model: Path
    rows: tuple[Row, ...]
    contenders: tuple[Contender, ...]
    threads: int
    logs: Path
    folder_for: Callable[[str], Path]
    say: Callable[[str], None]


def measure(plan: Plan, source: PromptSource, results: Results) -> None:
    """Fill in engines, rows and bandwidth."""
    with contextlib.ExitStack() as stack:
        runners = [stack.enter_context(_running(contender, plan)) for contender in plan.contenders]
        results.engines = [runner.result for runner in runners]
        _note_sizes(runners, results)
        plan.say("warming up")
        _warm_up(runners, plan, source)
        for number, row in enumerate(plan.rows):
            plan.say(f"{row.title}, {row.rounds} rounds")
            results.rows.append(RowRecord(row.name, row.title, row.num_streams, row.context, row.num_steps, row.rounds))
            _note_bandwidth(runners, results)
            if row.is_prefill:
                _measure_prefill(runners, row, source)
            else:
                streams = _measure_decode(runners, row, source)
                _note_same_tokens(runners, streams)
            if number == 0:
                _note_memory(runners)
        _note_bandwidth(runners, results)
        _note_peaks(runners)


@contextlib.contextmanager
def _running(contender: Contender, plan: Plan) -> Iterator[Runner]:
    """The engine loaded, or the reason why it isn't."""
    result = EngineResult(contender.name, contender.title, unavailable=contender.unavailable)
    runner = Runner(contender, result)
    if result.unavailable:
        plan.say(f"{contender.title}: {result.unavailable}")
        yield runner
        return
    try:
        model = plan.folder_for(contender.needs_folder) if contender.needs_folder else plan.model
    except (OSError, ValueError, KeyError) as error:
        result.unavailable = f"the model cannot be converted for it: {error}"
        yield runner
        return
    process = EngineProcess(contender.command, contender.environment, plan.logs / f"{contender.name}.log")
    try:
        _load(runner, process, model, plan)
        yield runner
    finally:
        process.close()


def _load(runner: Runner, process: EngineProcess, model: Path, plan: Plan) -> None:
    result = runner.result
    try:
        answer = process.ask(
            LOAD_TIMEOUT_S, op="load", model=str(model), threads=plan.threads, max_context=longest(plan.rows),
            max_streams=most_streams(plan.rows), options=runner.contender.options,
        )  # fmt: skip
    except EngineError as error:
        result.unavailable = f"does not start: {error}"
        plan.say(f"{result.title}: {result.unavailable}")
        return
    result.about, result.ready_s = answer["about"], time.perf_counter() - process.started_s
    runner.process = process
    plan.say(f"{result.title}: ready after {result.ready_s:.1f} s")


def _warm_up(runners: Sequence[Runner], plan: Plan, source: PromptSource) -> None:
    """One short measurement of each number of streams, not counted: some engines do more at a first time."""
    shapes = {row.num_streams: min(row.context, 256) for row in plan.rows}
    for num_streams, context in shapes.items():
        prompts = source.take(num_streams, context)
        for runner in runners:
            runner.ask("warm-up", op="start", prompts=prompts, num_new=8)
            runner.ask("warm-up", op="steps", count=4)
            runner.ask("warm-up", op="end")
    for runner in runners:
        cell = runner.result.rows.pop("warm-up", Cell())
        if cell.error and runner.process is not None:
            runner.result.unavailable = f"fails: {cell.error}"
            runner.process = None


def _measure_prefill(runners: Sequence[Runner], row: Row, source: PromptSource) -> None:
    for _ in range(row.rounds):
        prompts = source.take(row.num_streams, row.context)
        for runner in runners:
            answer = runner.ask(row.name, op="start", prompts=prompts, num_new=row.num_new)
            if answer is not None:
                runner.cell(row.name).samples.append(row.num_streams * row.context / answer["seconds"])
            runner.ask(row.name, op="end")


def _measure_decode(runners: Sequence[Runner], row: Row, source: PromptSource) -> dict[str, list[list[int]]]:
    """Returns the tokens of each engine's streams."""
    streams = {}
    prompts = source.take(row.num_streams, row.context)
    for runner in runners:
        runner.ask(row.name, op="start", prompts=prompts, num_new=row.num_new)
    for _ in range(row.rounds):
        for runner in runners:
            answer = runner.ask(row.name, op="steps", count=row.num_steps)
            if answer is not None:
                runner.cell(row.name).samples.append(answer["tokens"] / answer["seconds"])
                streams[runner.contender.name] = answer["streams"]
    for runner in runners:
        runner.ask(row.name, op="end")
    return streams


def _note_sizes(runners: Sequence[Runner], results: Results) -> None:
    for runner in _ours(runners):
        with contextlib.suppress(EngineError):
            assert runner.process is not None
            runner.result.sizes = runner.process.ask(TURN_TIMEOUT_S, op="sizes")
            results.weight_bytes = runner.result.sizes["weights"]


def _note_bandwidth(runners: Sequence[Runner], results: Results) -> None:
    for runner in _ours(runners)[:1]:
        with contextlib.suppress(EngineError):
            assert runner.process is not None
            results.bandwidth.append(runner.process.ask(TURN_TIMEOUT_S, op="bandwidth")["bytes_per_s"])


def _note_memory(runners: Sequence[Runner]) -> None:
    for runner in runners:
        if runner.process is not None:
            with contextlib.suppress(EngineError):
                runner.result.memory = runner.process.ask(TURN_TIMEOUT_S, op="memory")


def _note_peaks(runners: Sequence[Runner]) -> None:
    for runner in runners:
        if runner.process is not None:
            with contextlib.suppress(EngineError):
                runner.result.peak_bytes = runner.process.ask(TURN_TIMEOUT_S, op="memory")["peak"]


def _note_same_tokens(runners: Sequence[Runner], streams: dict[str, list[list[int]]]) -> None:
    """How far each engine's first stream agrees with our own, once: all greedy, so that more than rounding would show."""
    for runner in runners:
        theirs, expected = streams.get(runner.contender.name), streams.get(OURS)
        if runner.result.same_tokens is None and theirs and expected:
            pairs = zip(theirs[0], expected[0], strict=False)
            runner.result.same_tokens = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _ours(runners: Sequence[Runner]) -> list[Runner]:
    return [runner for runner in runners if runner.contender.name.startswith(OURS) and runner.process is not None]
