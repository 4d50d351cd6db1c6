"""Prompts: English prose that Python itself carries, cut into token ids once and for all engines."""

from pathlib import Path

from tokenizers import Tokenizer

from worker.model.load import open_checkpoint


def token_ids(model: Path, text: str) -> list[int]:
    """The text in a model's tokens, without control tokens."""
    tokenizer = Tokenizer.from_str(open_checkpoint(model).tokenizer.tokenizer_json)
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


class PromptSource:
    """Cuts prompts from a long text; none begins like one before it, so that no engine's cache helps, whatever its settings."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._at = 0

    def take(self, num_streams: int, length: int) -> list[list[int]]:
        """The next prompts. After the end of the text come its tokens again, from another place."""
        prompts = []
        for _ in range(num_streams):
            if self._at + length > len(self._ids):
                self._at = (self._at + 7) % 101
            prompts.append(self._ids[self._at : self._at + length])
            self._at += length
        if len(prompts[-1]) < length:
            raise ValueError(f"the text has only {len(self._ids)} tokens")
        return prompts
