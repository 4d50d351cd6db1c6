"""Stop strings in a text that arrives in pieces, found in linear time (Knuth, Morris and Pratt, 1977)."""

from collections.abc import Iterable


class StopMatcher:
    """Finds the match that begins earliest in the text, however the text is cut into pieces.

    A match may be complete while another that begins before it is still possible: it is not decided then.
    Places are numbers of characters since the beginning of the text.
    """

    __slots__ = ("_patterns", "match", "num_characters")

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops if stop]
        self.num_characters = 0
        self.match: int | None = None

    @property
    def num_safe(self) -> int:
        """Characters that belong to no stop string, whatever may follow."""
        limit = self.num_characters if self.match is None else self.match
        for pattern in self._patterns:
            limit = min(limit, self.num_characters - pattern.num_matched)
        return limit

    @property
    def is_decided(self) -> bool:
        """Whether `match` is where the text ends, whatever may follow."""
        return self.match is not None and self.num_safe == self.match

    def push(self, text: str, *, counts: bool) -> None:
        """Go on with `text`; a stop string that is complete in it is a match if it `counts`."""
        for pattern in self._patterns:
            start = pattern.push(text, self.num_characters)
            if counts and start is not None and (self.match is None or start < self.match):
                self.match = start
        self.num_characters += len(text)


class _Pattern:
    """One stop string and the length of its longest beginning that is an end of the text."""

    __slots__ = ("_borders", "_text", "num_matched")

    def __init__(self, text: str) -> None:
        self.num_matched = 0
        self._text = text
        # For each beginning of the stop string the longest shorter one that it ends with; grown when needed.
        self._borders = [0, 0]

    def push(self, text: str, num_before: int) -> int | None:
        """Go on with `text`; where the first stop string that is complete in it begins."""
        stop, matched, found = self._text, self.num_matched, None
        if matched == 0 and stop[0] not in text:
            return None
        for place, character in enumerate(text, num_before + 1):
            while matched and stop[matched] != character:
                matched = self._border(matched)
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    found = place - matched if found is None else found
                    matched = self._border(matched)
        self.num_matched = matched
        return found

    def _border(self, size: int) -> int:
        stop, borders = self._text, self._borders
        while len(borders) <= size:
            border, character = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + 1 if stop[border] == character else 0)
        return borders[size]
