"""One sequence's sampling rules together with what they need to know of its history."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from protocol.job import SamplingParams
from worker.sampling.randomness import uniform
from worker.sampling.token_counts import TokenCounts

# Below this the distribution has long been a single token.
MIN_TEMPERATURE = 1e-5

# A tiny repetition penalty pushes logits to any height: they saturate here, where differences are still finite.
_MAX_LOGIT = np.finfo(np.float32).max

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class SamplerRow:
    """Adjusts a row of logits by penalties, bias and masks; knows which tokens end the text.

    Its state is a function of prompt and output tokens: a sequence whose KV is computed again keeps it, and one
    that is resumed elsewhere gets it back by `observe`, token by token. Biases and end tokens outside the
    vocabulary are ignored.
    """

    __slots__ = (
        "_bias", "_bias_ids", "_ending", "_ending_ids", "_history", "_index",
        "is_greedy", "num_output", "params",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        *,
        index: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.num_output = 0
        self.is_greedy = params.temperature < MIN_TEMPERATURE or params.top_k == 1
        self._index = index
        self._ending = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ending |= eos_token_ids
        self._ending_ids = _inside(sorted(self._ending), vocab_size)
        bias = dict(params.logit_bias)
        self._bias_ids = _inside(bias, vocab_size)
        self._bias = np.array([bias[token] for token in self._bias_ids.tolist()], dtype=np.float32)
        self._history: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self._history = TokenCounts(prompt_token_ids)
        elif params.presence_penalty or params.frequency_penalty:
            self._history = TokenCounts(())

    def observe(self, token_id: int) -> None:
        """A token was generated."""
        self.num_output += 1
        if self._history is not None:
            self._history.add(token_id)

    def ends_with(self, token_id: int) -> bool:
        """Whether this token ends the text: EOS tokens unless ignored, and the request's own stop tokens."""
        return token_id in self._ending

    def uniform(self) -> float:
        """The random number of the next token."""
        return uniform(self.params.seed, self._index, self.num_output)

    def adjusted(self, logits: Logits) -> Logits:
        """The logits after repetition penalty, presence and frequency penalties, bias, and the min_tokens mask.

        The row itself is not changed; it is returned if there is nothing to do. The mask wins over any bias. It
        is left out only where no finite logit would remain, because the model itself rules out all other tokens.
        """
        is_masked = self.num_output < self.params.min_tokens and len(self._ending_ids) > 0
        if self._history is None and not len(self._bias) and not is_masked:
            return logits
        row = logits.copy()
        if self._history is not None:
            _penalize(row, self._history, self.params)
        row[self._bias_ids] += self._bias
        if is_masked:
            kept = row[self._ending_ids]
            row[self._ending_ids] = -np.inf
            if row.max() == -np.inf:
                row[self._ending_ids] = kept
        return row


def _penalize(row: Logits, history: TokenCounts, params: SamplingParams) -> None:
    """Repetition divides positive logits by its penalty and multiplies negative ones (Keskar et al., 2019)."""
    ids = history.ids
    if params.repetition_penalty != 1.0:
        values = row[ids].astype(np.float64)
        with np.errstate(over="ignore"):
            penalty = params.repetition_penalty
            row[ids] = np.minimum(np.where(values > 0, values / penalty, values * penalty), _MAX_LOGIT)
    if params.presence_penalty or params.frequency_penalty:
        counts = history.counts
        row[ids] -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts


def _inside(token_ids: Iterable[int], vocab_size: int) -> Ids:
    return np.array([token for token in token_ids if 0 <= token < vocab_size], dtype=np.int64)
