"""User text can't become control tokens.

Before a template sees a user's string, each character that begins a control token in it is replaced by an unguessable mark. So is one at which
a control token could begin or go on together with what the template writes next to the string. The rendered prompt is then split at control
tokens: all that are found were written by the template. In the text between them the marks become their characters again.
"""

import re
import secrets
from collections.abc import Mapping

Piece = str | int  # plain text, or a control token's id

# Any prompt's mark: one pattern for all of them, since compiling one takes longer than the rest of a short prompt.
_MARK = re.compile("(\ue000[0-9]{20}-)([0-9]{1,7})\ue001")


class ControlText:
    """The control tokens of one tokenizer."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._ids = dict(control_tokens)
        by_length = sorted(filter(None, self._ids), key=len, reverse=True)
        either = "|".join(map(re.escape, by_length))
        self._pattern = re.compile(either) if by_length else None
        # A look-ahead finds a token that begins inside another one as well.
        self._starts = re.compile(f"(?={either})")
        self._heads = {token[:size] for token in by_length for size in range(1, len(token))}
        self._tails = {token[start:] for token in by_length for start in range(1, len(token))}
        self._tokens = by_length

    def new_mark(self) -> str:
        """What the marks of one prompt begin with."""
        # Private-use characters and digits: template code such as strip() or upper() leaves them as they are.
        return f"\ue000{secrets.randbits(64):020d}-"

    def protect(self, text: str, mark: str) -> str:
        """The text, in which nothing is or can become part of a control token."""
        if self._pattern is None:
            return text
        places = {match.start() for match in self._starts.finditer(text)} | self._edges(text)
        parts, position = [], 0
        for place in sorted(places):
            parts += [text[position:place], mark, str(ord(text[place])), "\ue001"]
            position = place + 1
        return "".join([*parts, text[position:]])

    def split(self, rendered: str, mark: str) -> list[Piece]:
        """The rendered prompt as plain text and control token ids, in order, marks undone."""
        pieces: list[Piece] = []
        position = 0
        for match in self._pattern.finditer(rendered) if self._pattern else ():
            _add_text(pieces, rendered[position : match.start()], mark)
            pieces.append(self._ids[match[0]])
            position = match.end()
        _add_text(pieces, rendered[position:], mark)
        return pieces

    def _edges(self, text: str) -> set[int]:
        """Places where the string's begin or end, white space aside (a template may strip it), could meet the template's text to form a token."""
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        longest = len(self._tokens[0])
        places = {place for place in range(max(start, end - longest), end) if text[place:end] in self._heads}
        if any(text[start : start + size] in self._tails for size in range(1, min(longest, end - start) + 1)) or (
            end - start < longest and any(text[start:end] in token for token in self._tokens) and end > start
        ):
            places.add(start)
        return places


def _add_text(pieces: list[Piece], text: str, mark: str) -> None:
    if mark in text:
        text = _MARK.sub(lambda found: chr(int(found[2])) if found[1] == mark else found[0], text)
    if text:
        pieces.append(text)
