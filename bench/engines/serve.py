"""The side of the protocol that lives in an engine's process. Standard library only: it runs in every peer's own environment.

One JSON object a line comes in on standard input, one goes out for each on standard output:

    {"op": "load", "model": PATH, "threads": N, "max_context": N, "max_streams": N, "options": {...}}
                                                  -> {"about": {...}, "seconds": S}
    {"op": "start", "prompts": [[ID, ...], ...], "num_new": N}   -> {"seconds": S}    until each stream has its first token
    {"op": "steps", "count": N}                   -> {"seconds": S, "tokens": N, "streams": [[ID, ...], ...]}
    {"op": "end"}, {"op": "memory"}, {"op": "bandwidth"}, {"op": "quit"}

What fails is answered with {"error": TEXT}. The clock is read here and nowhere else, so that all engines are timed alike.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

MAX_IDLE_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What an engine is to load. `max_context` are tokens of a stream, `options` are its own."""

    model: str
    threads: int
    max_context: int
    max_streams: int
    options: dict[str, Any]


class Engine(Protocol):
    """What an engine's module provides. Streams are numbered from 0; all decoding is greedy and goes on past an end token."""

    def load(self, wanted: LoadRequest) -> dict[str, str]:
        """Load the model and be ready; returns what is worth telling of the set-up."""
        ...

    def prepare(self, num_streams: int, num_tokens: int) -> None:
        """Make room for streams of `num_tokens` each, prompt and answer; not timed."""
        ...

    def submit(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """Start one stream for each prompt."""
        ...

    def step(self) -> list[tuple[int, int]]:
        """Do one step of whatever is due; returns (stream, token) for each token that it produced."""
        ...

    def end(self) -> None:
        """Drop all streams."""
        ...


class Service:
    """Answers the requests of one process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: list[list[int]] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks."""
        operation = request["op"]
        if operation == "load":
            return self._load(request)
        if operation == "start":
            return self._start(request["prompts"], request["num_new"])
        if operation == "steps":
            return self._steps(request["count"])
        if operation == "end":
            self._engine.end()
            self._streams = []
            return {}
        if operation == "memory":
            return memory()
        extra = getattr(self._engine, operation, None)
        if extra is None:
            raise ValueError(f"unknown operation {operation!r}")
        answer: dict[str, Any] = extra()
        return answer

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        started_s = time.perf_counter()
        about = self._engine.load(
            LoadRequest(
                request["model"],
                request["threads"],
                request["max_context"],
                request["max_streams"],
                request["options"],
            )
        )
        return {"about": about, "seconds": time.perf_counter() - started_s}

    def _start(self, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        self._streams = [[] for _ in prompts]
        self._engine.prepare(len(prompts), max(map(len, prompts)) + num_new)
        started_s = time.perf_counter()
        self._engine.submit(prompts, num_new)
        self._run_until(1)
        return {"seconds": time.perf_counter() - started_s}

    def _steps(self, count: int) -> dict[str, Any]:
        """Time until each stream has `count` more tokens; whatever else was produced meanwhile is counted too."""
        before = [len(stream) for stream in self._streams]
        started_s = time.perf_counter()
        self._run_until(min(before) + count)
        seconds = time.perf_counter() - started_s
        produced = [stream[start:] for stream, start in zip(self._streams, before, strict=True)]
        return {"seconds": seconds, "tokens": sum(map(len, produced)), "streams": self._streams}

    def _run_until(self, length: int) -> None:
        idle = 0
        while min(map(len, self._streams)) < length:
            produced = self._engine.step()
            for stream, token in produced:
                self._streams[stream].append(token)
            idle = 0 if produced else idle + 1
            if idle > MAX_IDLE_STEPS:
                raise RuntimeError("the engine produces no tokens")


def memory(process: int | str = "self") -> dict[str, int]:
    """A process's bytes: resident now, at most so far, and resident without what is mapped from files."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"resident": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon"}
    return {key: int(fields[name].split()[0]) * 1024 for key, name in names.items()}


def serve(engine: Engine) -> None:
    """Answer requests until told to quit or the parent has gone."""
    requests, replies = sys.stdin, _private_stdout()
    service = Service(engine)
    for line in requests:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            reply = service.answer(request)
        except Exception as error:  # whatever it is, the parent is told, and the run goes on without this engine
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    # Some engines' threads keep a process from ending; there is nothing left to save.
    os._exit(0)


def _private_stdout() -> IO[str]:
    """Standard output for the protocol alone; what libraries print goes to standard error."""
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private
