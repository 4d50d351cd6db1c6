"""Root mean square normalization of each head for GPUs: one program a head."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT


@triton.jit
def _head_norm(x, weight, eps, row_stride, head_stride, dim, PADDED: tl.constexpr):
    i = tl.arange(0, PADDED)
    place = x + tl.program_id(0).to(tl.int64) * row_stride + tl.program_id(1) * head_stride + i
    numbers = tl.load(place, mask=i < dim, other=0.0)
    root = tl.sqrt_rn(tl.math.div_rn(tl.sum(numbers * numbers, axis=0), dim.to(tl.float32)) + eps)
    factor = tl.math.div_rn(tl.full((), 1.0, tl.float32), root)
    tl.store(place, numbers * factor * tl.load(weight + i, mask=i < dim, other=0.0), mask=i < dim)


def head_norm_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x float32 [T, heads, D] in place; arguments have been checked. The order of additions depends on D alone."""
    rows, heads, dim = x.shape
    _head_norm[(rows, heads)](
        x, weight, eps, x.stride(0), x.stride(1), dim, PADDED=triton.next_power_of_2(dim), num_warps=1, **EXACT
    )
