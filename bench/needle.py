"""Facts to be found again in a long text: each is put in at some depth and asked for at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from protocol.model_card import TokenizerSpec
from worker.quantize.texts import evaluation_text

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FACTS = (
    ("lighthouse", "48213"),
    ("orchard", "70956"),
    ("railway station", "31587"),
    ("observatory", "92640"),
    ("bakery", "15874"),
)

Logits = Callable[[list[int], int], torch.Tensor]  # (tokens, first) -> float32 [num_tokens - first, vocab]


@dataclass(frozen=True, slots=True)
class Needle:
    """A text with a fact at a depth (0: at the beginning), a question, and the answer's tokens at its end."""

    depth: float
    tokens: list[int]
    num_answer_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """Whether each token of the answer was the likeliest, and their mean probability (geometric)."""

    depth: float
    is_found: bool
    probability: float


def needles(spec: TokenizerSpec, num_tokens: int) -> list[Needle]:
    """One text of about `num_tokens` for each depth, with a fact of its own."""
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    first = [spec.bos_token_id] if spec.add_bos and spec.bos_token_id is not None else []
    hay = ids(evaluation_text()[-20 * num_tokens :])  # far from the part whose perplexity is measured
    made = []
    for depth, (place, number) in zip(DEPTHS, _FACTS, strict=True):
        fact = ids(f"\n\nRemember this: the secret number of the {place} is {number}.\n\n")
        question = ids(f"\n\nAs was said above, the secret number of the {place} is")
        answer = ids(f" {number}")
        room = max(0, num_tokens - len(first) - len(fact) - len(question) - len(answer))
        at = int(depth * room)
        made.append(Needle(depth, [*first, *hay[:at], *fact, *hay[at:room], *question, *answer], len(answer)))
    return made


def search(needle: Needle, logits: Logits) -> Found:
    """One pass over a text."""
    answer = torch.tensor(needle.tokens[-needle.num_answer_tokens :])
    first = len(needle.tokens) - needle.num_answer_tokens - 1
    scores = logits(needle.tokens, first)[:-1].log_softmax(dim=1)
    mean = scores.gather(1, answer[:, None]).mean()
    return Found(needle.depth, bool((scores.argmax(dim=1) == answer).all()), float(mean.exp()))


def num_found(found: Sequence[Found]) -> int:
    """How many facts."""
    return sum(one.is_found for one in found)
