"""Tokens and logprobs in the forms that OpenAI's two APIs give them."""

import codecs
from typing import Any

from protocol.replies import TokenLogprob


def token_text(raw: bytes) -> str:
    """A token as a string; one that is no whole UTF-8 text is written out as bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """One entry of a chat choice's logprobs.content."""
    return {
        "token": token_text(entry.token),
        "logprob": entry.logprob,
        "bytes": list(entry.token),
        "top_logprobs": [
            {"token": token_text(raw), "logprob": logprob, "bytes": list(raw)} for _, raw, logprob in entry.top
        ],
    }


class LegacyLogprobs:
    """The parallel lists of a text completion's logprobs; `offset` counts characters of the text before."""

    def __init__(self) -> None:
        self._offset = 0
        # Counts a character that is split over tokens once, where it's complete.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, tokens: list[bytes], entries: list[TokenLogprob | None]) -> dict[str, Any]:
        """The next entries. One without a value (the first of an echoed prompt) is null."""
        offsets = []
        for raw in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(raw))
        return {
            "tokens": [token_text(raw) for raw in tokens],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else _top(entry) for entry in entries],
            "text_offset": offsets,
        }


def _top(entry: TokenLogprob) -> dict[str, float]:
    """Alternatives by text; the chosen token is always among them, as clients look for it there."""
    top = {token_text(raw): logprob for _, raw, logprob in entry.top}
    top.setdefault(token_text(entry.token), entry.logprob)
    return top


def usage_object(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
