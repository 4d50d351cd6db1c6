"""The gated activation gelu(gate) * up."""

import torch

from kernels.backend import Backend
from kernels.checks import check_tensor, output, sizes
from kernels.errors import KernelError
from kernels.gelu_mul.ref import gelu_mul_ref


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, backend: Backend) -> torch.Tensor:
    """gate_up float32 [T, 2F], gate in the first half -> float32 [T, F]. GELU in its tanh form."""
    rows, width = sizes("gelu_mul", "gate_up", gate_up, 2)
    check_tensor("gelu_mul", "gate_up", gate_up, torch.float32, (None, width), backend)
    if width % 2:
        raise KernelError(f"gelu_mul: gate_up must have an even width, got {width}")
    size = width // 2
    result = output("gelu_mul", out, (rows, size), backend)
    if backend is Backend.REF:
        return result.copy_(gelu_mul_ref(gate_up[:, :size], gate_up[:, size:]))
    if backend is Backend.GPU:
        if result.numel():
            from kernels.gelu_mul.gpu import gelu_mul_gpu

            gelu_mul_gpu(gate_up, result)
        return result
    from kernels import _native

    gate = gate_up.data_ptr()
    _native.gelu_mul(gate, gate + 4 * size, width, rows, size, result.data_ptr())
    return result
