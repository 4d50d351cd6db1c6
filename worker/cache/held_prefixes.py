"""What a worker tells others about its cache: the digests of the landmarks (protocol.routing) that its findable pages reach, and of its last sessions.

Written in the engine's thread and in the event loop's, read in the latter. Bounded: of more prefixes than MAX_PREFIXES the ones that came last are
told.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_PREFIXES = 4096
MAX_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class Changes:
    """What to add and what to take away, or all that there is."""

    added: tuple[bytes, ...]
    gone: tuple[bytes, ...]
    is_whole: bool = False


class HeldPrefixes:
    """`on_change` is called when there's something to tell after there was nothing, in the thread that caused it."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._pages: Counter[bytes] = Counter()  # pages of different lengths may reach over the same landmark
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()
        self._sessions: OrderedDict[bytes, None] = OrderedDict()
        self._changes: dict[bytes, bool] = {}
        self._must_tell_all = False

    def add(self, digests: Iterable[bytes]) -> None:
        """A page that reaches these landmarks can be found."""
        with self._lock:
            was_quiet = not self._changes
            for digest in digests:
                self._pages[digest] += 1
                if self._pages[digest] == 1:
                    self._note(self._prefixes, digest, MAX_PREFIXES)
            has_news = was_quiet and bool(self._changes)
        if has_news:
            self.on_change()

    def remove(self, digests: Iterable[bytes]) -> None:
        """Such a page can't be found any more."""
        with self._lock:
            was_quiet = not self._changes
            for digest in digests:
                self._pages[digest] -= 1
                if self._pages[digest] <= 0:
                    del self._pages[digest]
                    if digest in self._prefixes:
                        del self._prefixes[digest]
                        self._changes[digest] = False
            has_news = was_quiet and bool(self._changes)
        if has_news:
            self.on_change()

    def note_session(self, digest: bytes) -> None:
        """A session's request is here."""
        with self._lock:
            was_quiet = not self._changes
            if digest in self._sessions:
                self._sessions.move_to_end(digest)
            else:
                self._note(self._sessions, digest, MAX_SESSIONS)
            has_news = was_quiet and bool(self._changes)
        if has_news:
            self.on_change()

    def take_changes(self, *, is_whole: bool) -> Changes:
        """What has changed since the last call; everything if that's wanted, or simpler."""
        with self._lock:
            changes, self._changes = self._changes, {}
            is_whole, self._must_tell_all = is_whole or self._must_tell_all, False
            if is_whole:
                return Changes((*self._prefixes, *self._sessions), (), True)
        added = tuple(digest for digest, is_here in changes.items() if is_here)
        return Changes(added, tuple(digest for digest, is_here in changes.items() if not is_here))

    def _note(self, known: "OrderedDict[bytes, None]", digest: bytes, most: int) -> None:
        known[digest] = None
        self._changes[digest] = True
        if len(known) > most:
            self._changes[known.popitem(last=False)[0]] = False
        if len(self._changes) > 4 * (MAX_PREFIXES + MAX_SESSIONS):
            # Nobody has taken them for long.
            self._changes, self._must_tell_all = {digest: True}, True
