"""A model's tokenizer and template, and the way from messages or text to tokens."""

import re

from tokenizers import Tokenizer

from gateway.errors import bad_request
from gateway.intake.control_text import ControlText
from gateway.intake.template import ChatTemplate
from protocol.model_card import TokenizerSpec


class PromptEncoder:
    """Made from a TokenizerSpec; has no other source."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.vocab_size = spec.vocab_size
        self._spec = spec
        self._tokenizer = Tokenizer.from_str(spec.tokenizer_json)
        control = dict(spec.control_tokens)
        self._control = ControlText(control)
        names = {index: text for text, index in control.items()}
        self._bos_text = names.get(spec.bos_token_id, "") if spec.bos_token_id is not None else ""
        self._eos_text = names.get(spec.eos_token_ids[0], "") if spec.eos_token_ids else ""
        self._template: ChatTemplate | None = None
        self._text_ids = dict(spec.text_tokens)
        by_length = sorted(filter(None, self._text_ids), key=len, reverse=True)
        self._text_tokens = re.compile("|".join(map(re.escape, by_length))) if by_length else None

    def chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Tokens of a conversation, ready for the assistant's turn; raises ApiError."""
        template = self._compiled()
        mark = self._control.new_mark()
        protected = [
            {name: text if name == "role" else self._control.protect(text, mark) for name, text in message.items()}
            for message in messages
        ]
        pieces = self._control.split(template.render(protected), mark)
        ids: list[int] = []
        for piece in pieces:
            ids.extend([piece] if isinstance(piece, int) else self._plain(piece))
        return self._with_bos(ids)

    def text(self, text: str) -> tuple[int, ...]:
        """Tokens of plain text, in which the names of control tokens are text like any other."""
        return self._with_bos(self._plain(text))

    def _compiled(self) -> ChatTemplate:
        """The template, compiled at its first use: a bad one, or one that takes for ever, concerns chat alone."""
        if self._spec.chat_template is None:
            raise bad_request("This model has no chat template; use /v1/completions.", "model")
        if self._template is None:
            self._template = ChatTemplate(self._spec.chat_template, self._bos_text, self._eos_text)
        return self._template

    def _plain(self, text: str) -> list[int]:
        """Tokens of text, added tokens that are text (`<think>`) among them."""
        ids: list[int] = []
        position = 0
        for match in self._text_tokens.finditer(text) if self._text_tokens else ():
            ids += [*self._ordinary(text[position : match.start()]), self._text_ids[match[0]]]
            position = match.end()
        return ids + self._ordinary(text[position:])

    def _ordinary(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def _with_bos(self, ids: list[int]) -> tuple[int, ...]:
        """Exactly one BOS token at the start, if the model wants one."""
        bos = self._spec.bos_token_id
        if self._spec.add_bos and bos is not None and ids[:1] != [bos]:
            return (bos, *ids)
        return tuple(ids)
