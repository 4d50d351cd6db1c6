"""GPTQ (Frantar et al., 2023, arXiv:2210.17323): columns are rounded one after another, and those to come make up for each error.

The error that is kept small is that of the products with real inputs, by their second moments, not that of the weights. Columns go from those with the
strongest inputs to the weakest; groups and their scales are those of neighbouring columns nevertheless, fixed beforehand, so that the result
needs no order of columns beside it ("static groups").
"""

import torch

from worker.quantize.rounding import Precision, Quantized, encode, search_scales

_BATCH = 128  # columns whose errors reach the rest of the matrix in one product
_DAMPING = 0.03
_TRIES = 6


def gptq(weight: torch.Tensor, moments: torch.Tensor, precision: Precision, scale_dtype: torch.dtype) -> Quantized:
    """weight float32 [N, K] by moments float32 [K, K], the sum of x x^T over inputs x; neither is changed."""
    diagonal = moments.diagonal().clone()
    # A column that no input touched says nothing of its own weights: they are rounded as they stand.
    diagonal[diagonal <= 0] = max(float(diagonal.mean()), 1e-12)
    scale, zero = search_scales(weight, precision, scale_dtype, importance=(diagonal / diagonal.mean()).sqrt())
    order = torch.argsort(diagonal, descending=True, stable=True)
    spread = _inverse_factor(moments, diagonal, order)
    group = order // precision.group_size
    scales = scale.float().t()[group]  # [K, N]
    zeros = None if zero is None else zero.float().t()[group]
    rest = weight.t()[order].contiguous()  # [K, N]; what is left to be represented
    codes = torch.empty(rest.shape, dtype=torch.int8)
    for first in range(0, len(rest), _BATCH):
        last = min(first + _BATCH, len(rest))
        errors = torch.empty(last - first, rest.shape[1])
        for column in range(first, last):
            value, row_scale = rest[column], scales[column]
            row_zero = None if zeros is None else zeros[column]
            code = encode(value, row_scale, row_zero, precision)
            codes[column] = code.to(torch.int8)
            if row_zero is not None:
                code -= row_zero
            error = (value - code * row_scale) / spread[column, column]
            errors[column - first] = error
            rest[column + 1 : last].addr_(spread[column, column + 1 : last], error, alpha=-1)
        if last < len(rest):
            rest[last:].addmm_(spread[first:last, last:].t(), errors, alpha=-1)
    ordered = torch.empty_like(codes)
    ordered[order] = codes
    return Quantized(ordered.t().contiguous(), scale, zero)


def _inverse_factor(moments: torch.Tensor, diagonal: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped moments' inverse, float32 [K, K], in the columns' order."""
    ordered = moments.double()
    ordered.diagonal().copy_(diagonal)
    ordered = ordered[order][:, order]
    damping = _DAMPING * float(diagonal.double().mean())
    for _ in range(_TRIES):
        damped = ordered + damping * torch.eye(len(order), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed):
                factor: torch.Tensor = upper.float()
                return factor
        damping *= 10
    # Inputs so degenerate that nothing can be learned of them: no column makes up for another, which is rounding to nearest.
    return torch.eye(len(order))
