"""Logprobs as they are reported: of the model itself, before penalties, temperature and filters."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worker.sampling.selection import largest

if TYPE_CHECKING:  # a worker without a model loads no torch
    import torch

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON can't say

Top = tuple[tuple[int, float], ...]


def row_logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> tuple[float, Top]:
    """The token's natural-log probability and the `num_top` likeliest tokens, ties in the order of ids.

    A row that is not finite has no probabilities: MIN_LOGPROB and no alternatives.
    """
    peak = float(logits.max())
    if not math.isfinite(peak):
        return MIN_LOGPROB, ()
    weights = logits.astype(np.float64)
    weights -= peak
    log_sum = math.log(np.exp(weights, out=weights).sum())
    top: Top = ()
    if num_top > 0:
        ids = largest(logits, num_top)
        # `ids` ascend, so a stable sort leaves ties in their order.
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        pairs = zip(ids.tolist(), logits[ids].tolist(), strict=True)
        top = tuple((token, max(value - peak - log_sum, MIN_LOGPROB)) for token, value in pairs)
    return max(float(logits[token_id]) - peak - log_sum, MIN_LOGPROB), top


def prompt_logprobs(logits: "torch.Tensor", next_ids: Sequence[int], num_top: int) -> list[tuple[float, Top]]:
    """For logits float32 [T, V] that predict `next_ids` [T]: the logprob of each and `num_top` alternatives.

    A row that is not finite counts as MIN_LOGPROB here: it spreads to all that follows it in the prompt, so that
    the request fails when its next token is sampled.
    """
    rows = logits.detach().numpy()
    return [row_logprobs(row, token_id, num_top) for row, token_id in zip(rows, next_ids, strict=True)]
