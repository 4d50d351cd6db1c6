"""How much of a busy engine's time the walk through the pool may take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.0025


class ScrubPace:
    """Lets the walk take SHARE of the time: each page is paid for by the steps after it. `now` returns seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen_s = now()
        self._credit_s = 0.0

    def is_due(self) -> bool:
        """Whether the last page is paid for. Time that passes unused buys nothing: idle engines walk by themselves."""
        now_s = self._now()
        self._credit_s = min(self._credit_s + SHARE * (now_s - self._seen_s), 0.0)
        self._seen_s = now_s
        return self._credit_s >= 0.0

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Count the time that is spent inside."""
        started_s = self._now()
        try:
            yield
        finally:
            self._credit_s -= self._now() - started_s
