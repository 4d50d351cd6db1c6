"""Choosing the next token of each row. A row's result depends on nothing but that row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protocol.job import SamplingParams
from worker.sampling.logprobs import Top, row_logprobs
from worker.sampling.row import Logits, SamplerRow
from worker.sampling.selection import Ids, Wide, draw, largest, nucleus

if TYPE_CHECKING:  # a worker without a model loads no torch
    import torch

# More than rounding may lose between a logarithm and its exponential.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; `logprob` and the likeliest tokens `top`, (id, logprob), if the row asks for them."""

    token_id: int
    logprob: float | None = None
    top: Top = ()


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The row held NaN, plus infinity or nothing finite: there is no token to choose."""


def sample(logits: "torch.Tensor", rows: Sequence[SamplerRow]) -> list[Sampled | NotFinite]:
    """One result for each row of logits, float32 [R, V] on the CPU, which are not changed."""
    values = logits.detach().numpy()
    return [sample_row(row_values, row) for row_values, row in zip(values, rows, strict=True)]


def sample_row(logits: Logits, row: SamplerRow) -> Sampled | NotFinite:
    """The result of one row, float32 [V], which is not changed."""
    # The first maximum, or the first NaN: numpy promises both, so one look finds out about the whole row.
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):
        return NotFinite()
    adjusted = row.adjusted(logits)
    if adjusted is not logits:
        best = int(adjusted.argmax())
        if not math.isfinite(adjusted[best]):
            return NotFinite()
    token_id = best if row.is_greedy else _draw_token(adjusted, best, row.params, row.uniform())
    if row.params.logprobs is None:
        return Sampled(token_id)
    logprob, top = row_logprobs(logits, token_id, row.params.logprobs)
    return Sampled(token_id, logprob, top)


def _draw_token(logits: Logits, best: int, params: SamplingParams, u: float) -> int:
    """Inverse transform sampling among the tokens that top_k, then top_p, then min_p leave."""
    ids: Ids | None = None
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
    scaled = (logits if ids is None else logits[ids]).astype(np.float64)
    scaled -= float(logits[best])
    if params.temperature != 1.0:
        scaled /= params.temperature
    places, weights = _kept(scaled, params)
    place = draw(weights, u)
    if places is not None:
        place = int(places[place])
    return place if ids is None else int(ids[place])


def _kept(scaled: Wide, params: SamplingParams) -> tuple[Ids | None, Wide]:
    """Places and weights after top_p and min_p; places are None if all are there. `scaled` is used up.

    What is filtered out is not there or has no weight. The likeliest token stays: its weight is exp(0) = 1.
    """
    places: Ids | None = None
    if params.top_p < 1.0:
        places, weights = nucleus(scaled, params.top_p)
    elif params.min_p > 0.0:
        places = np.flatnonzero(scaled >= math.log(params.min_p) - _SLACK)
        weights = np.exp(scaled[places])
    else:
        weights = np.exp(scaled, out=scaled)
    if params.min_p > 0.0:
        weights *= weights >= params.min_p
    return places, weights
