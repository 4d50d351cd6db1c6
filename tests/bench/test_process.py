"""An engine's process answers one request a line, and each way to fail becomes one error that says why."""

from collections.abc import Callable
from typing import Any

import pytest

from bench.process import EngineError, EngineProcess

Start = Callable[..., EngineProcess]


def test_streams_are_timed_until_each_has_its_tokens(scripted: Start, load_request: dict[str, Any]) -> None:
    """`start` ends with the first tokens, `steps` with as many more of each stream as asked for."""
    engine = scripted()

    assert {"kv": "none", "threads": "2"} == engine.ask(30, **load_request)["about"]
    assert engine.ask(30, op="start", prompts=[[1, 2], [3]], num_new=9)["seconds"] > 0
    answer = engine.ask(30, op="steps", count=3)

    assert 6 == answer["tokens"]
    assert [[0, 10, 20, 30], [1, 11, 21, 31]] == answer["streams"]
    assert {} == engine.ask(30, op="end")


def test_memory_is_the_process_own(scripted: Start, load_request: dict[str, Any]) -> None:
    """Resident bytes of a small Python process: some MB, and never more than the peak."""
    engine = scripted()
    engine.ask(30, **load_request)

    memory = engine.ask(30, op="memory")

    assert 4e6 < memory["anonymous"] <= memory["resident"] <= memory["peak"] < 1e9


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("no load", "RuntimeError: out of luck"),
        ("dies", "ended with code 3: .*terrible things"),
        ("hangs", "no answer to 'load' in time"),
    ],
)
def test_loading_fails_with_a_reason(scripted: Start, load_request: dict[str, Any], mode: str, reason: str) -> None:
    """An exception, a death and silence are told apart."""
    engine = scripted(mode)

    with pytest.raises(EngineError, match=reason):
        engine.ask(2 if mode == "hangs" else 30, **load_request)


def test_a_dead_process_is_told_again(scripted: Start, load_request: dict[str, Any]) -> None:
    """Whoever asks after the death gets the reason, not a broken pipe."""
    engine = scripted("dies")
    for _ in range(2):
        with pytest.raises(EngineError, match="terrible things"):
            engine.ask(30, **load_request)


def test_an_unknown_operation_is_refused(scripted: Start, load_request: dict[str, Any]) -> None:
    """The protocol is closed, but for what an engine's module adds."""
    engine = scripted()
    engine.ask(30, **load_request)

    with pytest.raises(EngineError, match="unknown operation 'dance'"):
        engine.ask(30, op="dance")
