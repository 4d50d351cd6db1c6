"""The walk through the pool takes its share of the time, and no more."""

import pytest

from worker.scrub_pace import SHARE, ScrubPace


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_share_of_the_time() -> None:
    """Steps of 5 ms and pages of 0.2 ms: over many steps the pages cost a half percent."""
    clock = Clock()
    pace, num_pages, num_steps = ScrubPace(clock), 0, 20_000
    for _ in range(num_steps):
        clock.now_s += 0.005
        if pace.is_due():
            with pace.charged():
                clock.now_s += 0.0002
                num_pages += 1

    assert num_pages * 0.0002 == pytest.approx(SHARE * (clock.now_s - 100.0), rel=0.01)


def test_idle_time_is_not_saved_up() -> None:
    """After an hour without work one page is due, not a thousand."""
    clock = Clock()
    pace = ScrubPace(clock)
    clock.now_s += 3600.0

    assert pace.is_due()
    with pace.charged():
        clock.now_s += 0.0002
    assert not pace.is_due()
