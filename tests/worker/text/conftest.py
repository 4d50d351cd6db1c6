"""Streams over a vocabulary that a test names."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protocol.replies import TokenLogprob
from worker.text import TextStream


class Writer:
    """Pushes pieces as tokens, in order, with an entry each, and keeps what is released.

    Token i is `pieces[i]`; None is an end token. The last piece is pushed as the last one allowed if `is_full`.
    """

    def __init__(self, pieces: Sequence[bytes | None], stops: Sequence[str], min_tokens: int, *, is_full: bool):
        vocabulary = [piece or b"" for piece in pieces]
        self.stream = TextStream(vocabulary, stops, min_tokens)
        self.deltas: list[str] = []
        self.entries: list[list[TokenLogprob]] = []
        self.finish_reason: str | None = None
        for token_id, piece in enumerate(pieces):
            released = self.stream.push(
                token_id,
                TokenLogprob(token_id, vocabulary[token_id], -0.5),
                ends_text=piece is None,
                is_full=is_full and token_id == len(pieces) - 1,
            )
            self.deltas.append(released.text)
            self.entries.append(released.entries)
            self.finish_reason = released.finish_reason
            if self.finish_reason is not None:
                break

    @property
    def text(self) -> str:
        """All text released."""
        return "".join(self.deltas)

    @property
    def shown_tokens(self) -> list[tuple[int, bytes]]:
        """Ids and bytes of all entries released."""
        return [(entry.token_id, entry.token) for entries in self.entries for entry in entries]

    @property
    def outcome(self) -> tuple[str, str | None]:
        """Text and reason."""
        return self.text, self.finish_reason


@pytest.fixture(scope="session")
def write() -> Callable[..., Any]:
    """A function of pieces (and stops, min_tokens, is_full) that gives the finished Writer."""

    def run(
        pieces: Sequence[bytes | None], *, stops: Sequence[str] = (), min_tokens: int = 0, is_full: bool = True
    ) -> Writer:
        return Writer(pieces, stops, min_tokens, is_full=is_full)

    return run
