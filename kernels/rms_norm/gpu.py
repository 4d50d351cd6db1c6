"""Root mean square normalization for GPUs: one program a row, with the residual sum in the same pass."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT

_LARGEST_STEP = 4096


@triton.jit
def _rms_norm(x, residual, weight, out, eps, size, HAS_RESIDUAL: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, STEP)
    squares = tl.zeros((STEP,), dtype=tl.float32)
    for first in range(0, size, STEP):
        is_there = first + column < size
        numbers = tl.load(x + row + first + column, mask=is_there, other=0.0)
        if HAS_RESIDUAL:
            numbers += tl.load(residual + row + first + column, mask=is_there, other=0.0)
        squares = tl.fma(numbers, numbers, squares)
    root = tl.sqrt_rn(tl.math.div_rn(tl.sum(squares, axis=0), size.to(tl.float32)) + eps)
    factor = tl.math.div_rn(tl.full((), 1.0, tl.float32), root)
    for first in range(0, size, STEP):
        is_there = first + column < size
        # Added up once more rather than read back: what another thread has stored would need a barrier.
        numbers = tl.load(x + row + first + column, mask=is_there, other=0.0)
        if HAS_RESIDUAL:
            numbers += tl.load(residual + row + first + column, mask=is_there, other=0.0)
            tl.store(residual + row + first + column, numbers, mask=is_there)
        scaled = numbers * factor * tl.load(weight + first + column, mask=is_there, other=0.0)
        tl.store(out + row + first + column, scaled, mask=is_there)


def rms_norm_gpu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """x float32 [T, H] -> out; arguments have been checked. The order of additions depends on H alone."""
    rows, size = x.shape
    _rms_norm[(rows,)](
        x, x if residual is None else residual, weight, out, eps, size,
        HAS_RESIDUAL=residual is not None, STEP=min(triton.next_power_of_2(size), _LARGEST_STEP), num_warps=4, **EXACT,
    )  # fmt: skip
