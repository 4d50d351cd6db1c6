"""Rotary position embedding for GPUs, in place."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT


@triton.jit
def _rotary(x, positions, table, row_stride, head_stride, num_positions, HALF: tl.constexpr, PADDED: tl.constexpr):
    """One head of one row. Negative positions are padding; one beyond the table would be a bug elsewhere, and gives NaN."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position >= 0:
        i = tl.arange(0, PADDED)
        is_known = (i < HALF) & (position + tl.zeros_like(i) < num_positions)
        turn = table + position.to(tl.int64) * 2 * HALF + i
        cosine = tl.load(turn, mask=is_known, other=float("nan"))
        sine = tl.load(turn + HALF, mask=is_known, other=float("nan"))
        pair = x + row * row_stride + head * head_stride + i
        first = tl.load(pair, mask=i < HALF, other=0.0)
        second = tl.load(pair + HALF, mask=i < HALF, other=0.0)
        tl.store(pair, first * cosine - second * sine, mask=i < HALF)
        tl.store(pair + HALF, second * cosine + first * sine, mask=i < HALF)


def rotary_gpu(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate x float32 [T, heads, D] in place, rows and heads as far apart as they lie; arguments have been checked."""
    rows, heads, dim = x.shape
    half = dim // 2
    _rotary[(rows, heads)](
        x, positions, table, x.stride(0), x.stride(1), len(table),
        HALF=half, PADDED=triton.next_power_of_2(half), num_warps=1, **EXACT,
    )  # fmt: skip
