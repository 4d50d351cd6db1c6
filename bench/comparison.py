"""Two models' next-token distributions over one text: perplexity, Kullback-Leibler divergence, agreement."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer

from kernels.kv_pool import KvDtype, KvPool
from worker.kv_scales import KvScales
from worker.model.load import LoadedModel
from worker.quantize.texts import evaluation_text
from worker.quantize.window_run import PAGE_SIZE, run_window

WINDOW_TOKENS = 512
SKIPPED_CHARACTERS = 20_000  # tables and grammars
_LARGEST_LOSS = 700.0


@dataclass(slots=True)
class Comparison:
    """One model beside a reference. Divergences are KL(reference || model) of each position, in nats."""

    title: str
    loss: float = 0.0  # nats
    same_likeliest: int = 0
    divergences: list[torch.Tensor] = field(default_factory=list)  # float32 [positions of a window]

    def add(self, logits: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """logits and expected float32 [num_tokens, vocab], targets int64 [num_tokens]."""
        ours, theirs = logits.log_softmax(dim=1), expected.log_softmax(dim=1)
        self.divergences.append((theirs.exp() * (theirs - ours)).sum(dim=1).clamp_(min=0))
        self.loss += float(torch.nn.functional.nll_loss(ours, targets, reduction="sum"))
        self.same_likeliest += int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())

    @property
    def num_tokens(self) -> int:
        """Predicted tokens so far."""
        return sum(len(part) for part in self.divergences)

    @property
    def perplexity(self) -> float:
        """Of the text; a broken model's is cut off where floats end."""
        return math.exp(min(self.loss / self.num_tokens, _LARGEST_LOSS))

    @property
    def mean_divergence(self) -> float:
        """Over all positions."""
        return float(torch.cat(self.divergences).double().mean())

    @property
    def p99_divergence(self) -> float:
        """One position in a hundred is further away."""
        return float(torch.cat(self.divergences).quantile(0.99))

    @property
    def largest_divergence(self) -> float:
        """Of the worst position."""
        return float(torch.cat(self.divergences).max())

    @property
    def same_share(self) -> float:
        """Of positions where both find the same token likeliest."""
        return self.same_likeliest / self.num_tokens

    def figures(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "title": self.title, "num_tokens": self.num_tokens, "loss": self.loss, "perplexity": self.perplexity,
            "mean_divergence": self.mean_divergence, "p99_divergence": self.p99_divergence,
            "largest_divergence": self.largest_divergence, "same_likeliest": self.same_likeliest, "same_share": self.same_share,
        }  # fmt: skip


def evaluation_windows(loaded: LoadedModel, num_tokens: int) -> list[list[int]]:
    """Windows of the evaluation text in the model's tokens, each begun as a prompt is; as many as fit. Raises ValueError."""
    spec = loaded.tokenizer
    first = [spec.bos_token_id] if spec.add_bos and spec.bos_token_id is not None else []
    step = WINDOW_TOKENS - len(first)
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    ids = tokenizer.encode(evaluation_text()[SKIPPED_CHARACTERS:], add_special_tokens=False).ids
    count, most = num_tokens // WINDOW_TOKENS, len(ids) // step
    if not 1 <= count <= most:
        raise ValueError(
            f"the number of tokens must be from {WINDOW_TOKENS} to {most * WINDOW_TOKENS}, got {num_tokens}"
        )
    return [[*first, *ids[row * step : (row + 1) * step]] for row in range(count)]


def logits_of(
    loaded: LoadedModel, tokens: list[int], kv_dtype: KvDtype, scales: KvScales | None = None, first_logit: int = 0
) -> torch.Tensor:
    """Logits float32 [num_tokens - first_logit, vocab], computed over pages as the engine does."""
    layout = loaded.kv_layout(-(-len(tokens) // PAGE_SIZE), PAGE_SIZE, kv_dtype)
    k_scale, v_scale = (scales.k, scales.v) if scales else (None, None)
    pool = KvPool.allocate(layout, k_scale, v_scale, backend=loaded.backend)
    return run_window(loaded.model, pool, tokens, first_logit)
