"""User text can't become control tokens.

Before a template sees a user's string, each place in it where a control token's text stands, or could be completed by what follows, gets an
unguessable mark inside. The rendered prompt is then split at control tokens: all that are found were written by the template. The marks
are taken out of the text between them, which is encoded as plain text.
"""

import re
import secrets
from collections.abc import Mapping

Piece = str | int  # plain text, or a control token's id


class ControlText:
    """The control tokens of one tokenizer."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._ids = dict(control_tokens)
        by_length = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self._beginnings = {token[:size] for token in by_length for size in range(1, len(token))}
        self._longest = max(map(len, by_length), default=0)

    def new_mark(self) -> str:
        """A mark for one prompt."""
        # A private-use character keeps tokenizer-minded template code, such as strip(), from touching it.
        return f"\ue000{secrets.token_hex(8)}\ue001"

    def protect(self, text: str, mark: str) -> str:
        """The text with a mark in every control token's text, and in an end that a template could complete to one."""
        if self._pattern is None:
            return text
        marked = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return self._protect_end(marked, mark)

    def split(self, rendered: str, mark: str) -> list[Piece]:
        """The rendered prompt as plain text and control token ids, in order, marks removed."""
        if self._pattern is None:
            return [rendered.replace(mark, "")] if rendered else []
        pieces: list[Piece] = []
        position = 0
        for match in self._pattern.finditer(rendered):
            _add_text(pieces, rendered[position : match.start()].replace(mark, ""))
            pieces.append(self._ids[match[0]])
            position = match.end()
        _add_text(pieces, rendered[position:].replace(mark, ""))
        return pieces

    def _protect_end(self, text: str, mark: str) -> str:
        """A beginning of a control token at the end, also behind white space that a template may strip, is cut after its first character."""
        kept = text.rstrip()
        for size in range(min(self._longest - 1, len(kept)), 0, -1):
            if kept[-size:] in self._beginnings:
                cut = len(kept) - size + 1
                return text[:cut] + mark + text[cut:]
        return text


def _add_text(pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(text)
