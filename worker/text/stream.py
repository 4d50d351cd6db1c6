"""What of a growing text may be shown: whole characters that belong to no stop string, and their logprobs."""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocol.replies import FinishReason, TokenLogprob
from worker.text.stop import StopMatcher
from worker.text.utf8 import REPLACEMENT, num_bytes

_DECODER = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Released:
    """What one token set free; a finish_reason means that nothing follows."""

    text: str
    entries: list[TokenLogprob]
    finish_reason: FinishReason | None


class TextStream:
    """The text of one sample: all its bytes decoded, up to the earliest stop string, however they come in tokens.

    The stop string and what follows it are not shown. One that is complete before `min_tokens` tokens does not end
    the text and is shown. Entries come with the text of their tokens: one whose token reaches into the stop string
    is cut to the bytes that are shown, later ones are dropped, one without bytes keeps its place in the order.
    """

    __slots__ = (
        "_decoder", "_entries", "_finish_reason", "_held", "_min_tokens", "_num_bytes", "_num_shown", "_num_tokens",
        "_stops", "_token_bytes", "_unshown",
    )  # fmt: skip

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str], min_tokens: int) -> None:
        self._token_bytes = token_bytes
        self._min_tokens = min_tokens
        self._stops = StopMatcher(stops)
        self._decoder = _DECODER(errors="replace")
        self._held = ""  # decoded, not shown
        self._unshown = b""  # the bytes of `_held` and of an unfinished character
        self._num_shown = 0  # characters
        self._num_bytes = 0
        self._num_tokens = 0
        # With the bytes [start, end) of their tokens.
        self._entries: deque[tuple[int, int, TokenLogprob]] = deque()
        self._finish_reason: FinishReason | None = None

    def push(self, token_id: int, entry: TokenLogprob | None, *, ends_text: bool, is_full: bool) -> Released:
        """Add a token. `ends_text`: it is an end token, whose own text is not shown; `is_full`: none may follow."""
        assert self._finish_reason is None, "the text has ended"
        self._num_tokens += 1
        if ends_text:
            return self._finish("stop")
        raw = self._token_bytes[token_id]
        start = self._num_bytes
        self._num_bytes += len(raw)
        if entry is not None:
            self._entries.append((start, self._num_bytes, entry))
        self._unshown += raw
        self._decode(raw)
        if is_full:
            return self._finish("length")
        if self._stops.is_decided:
            return self._finish("stop")
        return self._release(self._stops.num_safe)

    @property
    def num_held_entries(self) -> int:
        """Of how many tokens, the last ones, the entries wait for their text to be shown."""
        return len(self._entries)

    def _decode(self, raw: bytes, *, is_last: bool = False) -> None:
        text = self._decoder.decode(raw, is_last)
        self._held += text
        self._stops.push(text, counts=self._num_tokens >= self._min_tokens)

    def _finish(self, reason: FinishReason) -> Released:
        """End here or at a complete stop string; what was held is shown, an unfinished character as U+FFFD."""
        self._decode(b"", is_last=True)
        match = self._stops.match
        self._finish_reason = reason if match is None else "stop"
        released = self._release(self._stops.num_characters if match is None else match)
        entries = released.entries
        shown = self._num_bytes - len(self._unshown)
        if self._entries and self._entries[0][0] < shown:
            start, _, entry = self._entries[0]
            entries = [*entries, replace(entry, token=entry.token[: shown - start])]
        return Released(released.text, entries, self._finish_reason)

    def _release(self, num_characters: int) -> Released:
        """Show the text up to the place `num_characters`, with the entries of the tokens before that place."""
        count = num_characters - self._num_shown
        text, self._held = self._held[:count], self._held[count:]
        if text:
            self._num_shown = num_characters
            self._unshown = self._unshown[self._num_bytes_of(text) :]
        shown = self._num_bytes - len(self._unshown)
        entries = []
        while self._entries and self._entries[0][1] <= shown:
            entries.append(self._entries.popleft()[2])
        return Released(text, entries, None)

    def _num_bytes_of(self, text: str) -> int:
        """Bytes of `text`, the first of what was held."""
        if REPLACEMENT in text:
            return num_bytes(self._unshown, len(text))
        return len(text.encode("utf-8"))
