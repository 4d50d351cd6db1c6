"""Layer normalization for GPUs: one program a row, which fits its registers."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT


@triton.jit
def _layer_norm(x, weight, bias, out, eps, size, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, STEP)
    is_there = column < size
    numbers = tl.load(x + row + column, mask=is_there, other=0.0)
    width = size.to(tl.float32)
    centred = tl.where(is_there, numbers - tl.math.div_rn(tl.sum(numbers, axis=0), width), 0.0)
    variance = tl.math.div_rn(tl.sum(centred * centred, axis=0), width)
    factor = tl.math.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    scaled = centred * factor * tl.load(weight + column, mask=is_there, other=0.0)
    tl.store(out + row + column, scaled + tl.load(bias + column, mask=is_there, other=0.0), mask=is_there)


def layer_norm_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """x float32 [T, H] -> out; arguments have been checked. The order of additions depends on H alone."""
    rows, size = x.shape
    _layer_norm[(rows,)](
        x, weight, bias, out, eps, size, STEP=triton.next_power_of_2(size), num_warps=4, **EXACT
    )  # fmt: skip
