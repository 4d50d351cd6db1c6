"""Replies as the JSON objects of the two completion APIs: one shaper for each, with the same four methods.

`opening` gives the chunks that come first, `delta` those of one reply, `whole` the complete response. A choice's index is prompt number
* n + sample number.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.intake.call import GenerationCall
from gateway.token_text import LegacyLogprobs, chat_logprob, usage_object
from protocol.replies import Delta, FinishReason, PromptLogprobs, Reply, TokenLogprob


class Shaper(Protocol):
    """What the relay needs of either API."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        ...

    def delta(self, slot: int, reply: Reply) -> list[dict[str, Any]]:
        """Chunks of one reply."""
        ...

    def usage(self, usage: tuple[int, int, int]) -> dict[str, Any]:
        """The usage chunk."""
        ...

    def collect(self, slot: int, reply: Reply) -> None:
        """Keep a reply for `whole`."""
        ...

    def whole(self, usage: tuple[int, int, int]) -> dict[str, Any]:
        """The response that holds all that was collected."""
        ...


@dataclass(slots=True)
class _Choice:
    """One sample's text while it's collected."""

    texts: list[str] = field(default_factory=list)
    entries: list[TokenLogprob | None] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class _Shape:
    """What both APIs share."""

    def __init__(self, call: GenerationCall, fingerprint: str, prefix: str) -> None:
        self._call = call
        self._has_logprobs = call.samplings[0].logprobs is not None
        self._head = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": call.model,
            "system_fingerprint": fingerprint,
        }
        self._choices = [_Choice() for _ in range(len(call.prompts) * call.n)]

    def _index(self, slot: int, sample: int) -> int:
        return slot * self._call.n + sample

    def collect(self, slot: int, reply: Reply) -> None:
        """Keep a reply for `whole`."""
        if isinstance(reply, Delta):
            choice = self._choices[self._index(slot, reply.index)]
            choice.texts.append(reply.text)
            choice.entries.extend(reply.logprobs)
            choice.tokens.extend(entry.token for entry in reply.logprobs)
            choice.finish_reason = reply.finish_reason or choice.finish_reason


class ChatShaper(_Shape):
    """chat.completion and chat.completion.chunk."""

    def __init__(self, call: GenerationCall, fingerprint: str) -> None:
        super().__init__(call, fingerprint, "chatcmpl-")

    def opening(self) -> list[dict[str, Any]]:
        """A role chunk for each choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(self._choice(index, delta, [], None)) for index in range(len(self._choices))]

    def delta(self, slot: int, reply: Reply) -> list[dict[str, Any]]:
        """A content chunk if there is text or logprobs, and a finish chunk at the end."""
        if not isinstance(reply, Delta):
            return []
        index, chunks = self._index(slot, reply.index), []
        if reply.text or reply.logprobs:
            chunks.append(self._chunk(self._choice(index, {"content": reply.text}, list(reply.logprobs), None)))
        if reply.finish_reason is not None:
            chunks.append(self._chunk(self._choice(index, {}, [], reply.finish_reason)))
        return chunks

    def usage(self, usage: tuple[int, int, int]) -> dict[str, Any]:
        """A chunk with usage and no choices."""
        return {**self._chunk(), "usage": usage_object(*usage)}

    def whole(self, usage: tuple[int, int, int]) -> dict[str, Any]:
        """The complete response."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": self._logprobs([entry for entry in choice.entries if entry is not None]),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_object(*usage)}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": list(choices)}

    def _choice(
        self, index: int, delta: dict[str, Any], entries: list[TokenLogprob], finish: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return {"content": [chat_logprob(entry) for entry in entries], "refusal": None}


class CompletionShaper(_Shape):
    """text_completion, whole and in chunks."""

    def __init__(self, call: GenerationCall, fingerprint: str) -> None:
        super().__init__(call, fingerprint, "cmpl-")
        self._lists = [LegacyLogprobs() for _ in self._choices]

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the first token."""
        return []

    def delta(self, slot: int, reply: Reply) -> list[dict[str, Any]]:
        """One chunk; for an echoed prompt one for each sample."""
        if isinstance(reply, PromptLogprobs):
            text = b"".join(reply.tokens).decode("utf-8", "replace")
            return [
                self._chunk(self._choice(index, text, list(reply.tokens), list(reply.entries), None))
                for index in self._indexes(slot)
            ]
        if not isinstance(reply, Delta) or not (reply.text or reply.logprobs or reply.finish_reason):
            return []
        entries: list[TokenLogprob | None] = list(reply.logprobs)
        tokens = [entry.token for entry in reply.logprobs]
        index = self._index(slot, reply.index)
        return [self._chunk(self._choice(index, reply.text, tokens, entries, reply.finish_reason))]

    def usage(self, usage: tuple[int, int, int]) -> dict[str, Any]:
        """A chunk with usage and no choices."""
        return {**self._chunk(), "usage": usage_object(*usage)}

    def collect(self, slot: int, reply: Reply) -> None:
        """Keep a reply; an echoed prompt begins every sample of its slot."""
        if isinstance(reply, PromptLogprobs):
            for index in self._indexes(slot):
                choice = self._choices[index]
                choice.texts.append(b"".join(reply.tokens).decode("utf-8", "replace"))
                choice.tokens.extend(reply.tokens)
                choice.entries.extend(reply.entries)
        super().collect(slot, reply)

    def whole(self, usage: tuple[int, int, int]) -> dict[str, Any]:
        """The complete response."""
        choices = [
            self._choice(index, "".join(choice.texts), choice.tokens, choice.entries, choice.finish_reason)
            for index, choice in enumerate(self._choices)
        ]
        return {**self._chunk(*choices), "usage": usage_object(*usage)}

    def _indexes(self, slot: int) -> range:
        return range(slot * self._call.n, (slot + 1) * self._call.n)

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "text_completion", "choices": list(choices)}

    def _choice(
        self,
        index: int,
        text: str,
        tokens: list[bytes],
        entries: list[TokenLogprob | None],
        finish: FinishReason | None,
    ) -> dict[str, Any]:
        logprobs = self._lists[index].lists(tokens, entries) if self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
