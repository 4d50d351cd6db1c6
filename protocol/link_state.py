"""Whether Redis answers, as one process sees it over all its connections.

When a server goes or comes back, connections learn of it one by one: for a moment some commands fail and others don't. The state changes once all
the same, and so it's worth a line in the log. No I/O here, and the clock is passed in.
"""

from collections.abc import Callable

SETTLE_DOWN_S = 0.25  # an answer so soon after a failure was on its way already
SETTLE_UP_S = 1.0  # a failure so soon after the first answer is an old connection's


class LinkState:
    """`failed` and `answered` return True when that changed the state."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.is_up = True
        self._since_s = float("-inf")
        self._failed_s = float("-inf")

    def failed(self) -> bool:
        """A command was not carried out."""
        now_s = self._failed_s = self._now_s()
        if not self.is_up or now_s - self._since_s < SETTLE_UP_S:
            return False
        self.is_up, self._since_s = False, now_s
        return True

    def answered(self) -> bool:
        """A command was carried out."""
        now_s = self._now_s()
        if self.is_up or now_s - self._failed_s < SETTLE_DOWN_S:
            return False
        self.is_up, self._since_s = True, now_s
        return True

    @property
    def for_s(self) -> float:
        """How long it has been so."""
        return self._now_s() - self._since_s
