"""The gated activation gelu(gate) * up for GPUs."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import EXACT

_STEP = tl.constexpr(1024)


@triton.jit
def _gelu_mul(gate_up, out, size):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _STEP + tl.arange(0, _STEP)
    is_there = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=is_there, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=is_there, other=0.0)
    # (1 + tanh(z / 2)) / 2 is the sigmoid of z.
    cubic, linear = tl.full(gate.shape, 0.0713548162726, tl.float32), tl.full(gate.shape, 1.5957691216057, tl.float32)
    z = gate * tl.fma(gate * gate, cubic, linear)
    tl.store(out + row * size + column, tl.math.div_rn(gate, 1.0 + tl.exp(-z)) * up, mask=is_there)


def gelu_mul_gpu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up float32 [T, 2F] -> out [T, F]; arguments have been checked."""
    rows, size = out.shape
    _gelu_mul[(rows, triton.cdiv(size, _STEP.value))](gate_up, out, size, num_warps=4, **EXACT)
