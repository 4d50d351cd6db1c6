"""Which of a tokenizer's added tokens are text that anybody may write, and which steer a conversation.

A file's flag alone doesn't tell: some models mark the tokens that separate turns as not special (`<|User|>` with full-width bars), and a user who could
write those could forge a turn. So a token is text only if the file calls it so AND it looks like markup or white space (`<think>`, `</tool_call>`, a run of
newlines), AND it neither begins nor ends anything. Everything else stays a control token: that a user can't write it is the safe side.
"""

import re
from collections.abc import Collection

_MARKUP = re.compile(r"</?[a-z][a-z0-9_]*>|\s+")
_NEVER = frozenset(
    {
        "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<unk>", "<mask>", "<sep>", "<cls>", "<eot>", "<eom>", "<eod>", "<start_of_turn>", "<end_of_turn>",
        "<end_of_utterance>", "<start_of_image>", "<end_of_image>", "<image>", "<system>", "<user>", "<assistant>", "<tool>", "<human>", "<bot>",
        "</system>", "</user>", "</assistant>", "</tool>", "</human>", "</bot>", "<turn>", "</turn>", "<end>", "<sys>", "</sys>", "<inst>", "</inst>",
    }
)  # fmt: skip


def is_text(token: str, steering: Collection[str]) -> bool:
    """Whether an added token that its file calls not special is text; `steering` holds the tokens that begin or end prompts and answers."""
    return _MARKUP.fullmatch(token) is not None and token not in _NEVER and token not in steering
