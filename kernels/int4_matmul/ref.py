"""y = x @ W.T in plain torch, in two forms: with float activations (the truth about the weights), and with the activations of 16 or 8
bits that the native version uses (the truth about its arithmetic)."""

import torch

from kernels.weights import Quantized, Weight

ROW_TILE = 16
MAX_CODE = 127 * 256  # of 16 bits
MAX_BYTE = 127
_WEIGHT_ROWS = 4096


def matmul_float_activations(x: torch.Tensor, w: Weight) -> torch.Tensor:
    """x float32 [M, K] -> float32 [M, N].

    Rows are computed in zero-padded tiles of 16, so that the library always gets the same shape and a row's bits don't depend on M.
    The matrix is dequantized a few thousand rows at a time.
    """
    num_rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
    parts = []
    for first in range(0, w.shape[0], _WEIGHT_ROWS):
        dense = w.dequantize(slice(first, first + _WEIGHT_ROWS)).T
        parts.append(torch.cat([tile @ dense for tile in torch.split(padded, ROW_TILE)]))
    return torch.cat(parts, dim=1)[:num_rows].contiguous()


def quantize_activations(x: torch.Tensor, group: int, bits: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes of 16 or 8 bits per row and group: int32 [M, K / g, g] and scale float32 [M, K / g], x ~ codes * scale.

    A code of 16 bits is 256 * high + low of two signed bytes; a low byte of -128 is stepped over, since AVX2 could not negate it.
    """
    grouped = x.view(x.shape[0], -1, group)
    amax = grouped.abs().amax(dim=2)
    largest = MAX_CODE if bits == 16 else MAX_BYTE
    inverse = torch.where(
        amax > 1e-30, torch.full_like(amax, largest) / amax, torch.zeros_like(amax)
    )  # number / tensor would round twice
    codes = torch.round(grouped * inverse.unsqueeze(2)).to(torch.int32)
    return codes + (codes & 255).eq(128).int() if bits == 16 else codes, amax / largest


def matmul_rounded_activations(x: torch.Tensor, w: Quantized, bits: int = 16) -> torch.Tensor:
    """What the native version computes, in float64: float64 [M, N]."""
    codes, scale = quantize_activations(x, w.group_size, bits)
    rounded = codes.double() * scale.double().unsqueeze(2)
    return rounded.flatten(1) @ w.dequantize().double().T
