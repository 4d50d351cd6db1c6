"""A product for each head on GPUs, as three TF32 products of float32 parts. The order of additions depends on the number of columns alone."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT

_ROWS, _OUTS, _COLUMNS = 16, 64, 32


@triton.jit(do_not_specialize=["num_rows"])
def _head_matmul(
    x, w, out, x_stride, num_rows,
    HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    k = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for first in range(0, K, COLUMNS):
        is_column = first + k < K
        x_place = x + m.to(tl.int64)[:, None] * x_stride + head * K + first + k[None, :]
        numbers = tl.load(x_place, mask=(m < num_rows)[:, None] & is_column[None, :], other=0.0)
        w_place = w + (head * N + n).to(tl.int64)[None, :] * K + first + k[:, None]
        weights = tl.load(w_place, mask=(n < N)[None, :] & is_column[:, None], other=0.0).to(tl.float32)
        total = tl.dot(numbers, weights, total, input_precision="tf32x3")
    place = out + (m.to(tl.int64)[:, None] * HEADS + head) * N + n[None, :]
    tl.store(place, total, mask=(m < num_rows)[:, None] & (n < N)[None, :])


def head_matmul_gpu(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """x float32 [T, heads, K], rows equally far apart, w [heads, N, K] -> out float32 [T, heads, N]; arguments have been checked."""
    num_rows, heads, num_out = out.shape
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_out, _OUTS), heads)
    _head_matmul[grid](
        x, w, out, x.stride(0), num_rows, HEADS=heads, N=num_out, K=x.shape[2], ROWS=_ROWS, OUTS=_OUTS, COLUMNS=_COLUMNS,
        num_warps=4, num_stages=3, **EXACT,
    )  # fmt: skip
