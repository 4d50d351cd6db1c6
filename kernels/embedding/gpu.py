"""Rows of a placed matrix, dequantized to float32."""

import torch
import triton
import triton.language as tl

from kernels.fp8_matmul.gpu import from_e4m3_codes
from kernels.gpu.launch import EXACT
from kernels.gpu_weights import FP8_GROUP, GpuDenseWeight, GpuFp8Weight, GpuInt4Weight, GpuInt8Weight, GpuWeight

_STEP = tl.constexpr(1024)


@triton.jit
def _quantized_rows(
    ids, codes, scales, out, unit, num_out, num_in, padded_out,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """A stretch of one row. An id outside the matrix would be a bug elsewhere, and gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * _STEP + tl.arange(0, _STEP)
    n = tl.load(ids + row) + tl.zeros((_STEP,), dtype=tl.int64)
    is_known = (k < num_in) & (n >= 0) & (n < num_out)
    planes: tl.constexpr = 16 // BITS
    padded = padded_out.to(tl.int64)
    chunk, within = k // (planes * WIDTH), k % (planes * WIDTH)
    words = tl.load(codes + (chunk * padded + n) * WIDTH + within % WIDTH, mask=is_known, other=0).to(tl.int32)
    code = ((words >> (within // WIDTH * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    scale = tl.load(scales + (k // GROUP) * padded + n, mask=is_known, other=0)
    if BITS == 8:
        code -= 128.0
    if HAS_MINIMUM:
        lower, upper = (scale & 0xFFFF).to(tl.int16), (scale >> 16).to(tl.int16)
        minimum = upper.to(tl.float16, bitcast=True).to(tl.float32)
        value = code * lower.to(tl.float16, bitcast=True).to(tl.float32) + minimum
    else:
        value = code * scale.to(tl.float32)
    tl.store(out + row * num_in + k, tl.where(is_known, value * unit, float("nan")), mask=k < num_in)


@triton.jit
def _dense_rows(ids, matrix, out, unit, num_out, num_in, stride):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * _STEP + tl.arange(0, _STEP)
    n = tl.load(ids + row) + tl.zeros((_STEP,), dtype=tl.int64)
    is_known = (k < num_in) & (n >= 0) & (n < num_out)
    value = tl.load(matrix + n * stride + k, mask=is_known, other=float("nan")).to(tl.float32)
    tl.store(out + row * num_in + k, value * unit, mask=k < num_in)


@triton.jit
def _fp8_rows(ids, codes, scales, out, num_out, num_in, padded_out, stride, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * _STEP + tl.arange(0, _STEP)
    n = tl.load(ids + row) + tl.zeros((_STEP,), dtype=tl.int64)
    is_known = (k < num_in) & (n >= 0) & (n < num_out)
    code = from_e4m3_codes(tl.load(codes + n * stride + k, mask=is_known, other=0)).to(tl.float32)
    scale = tl.load(scales + (k // GROUP) * padded_out.to(tl.int64) + n, mask=is_known, other=float("nan"))
    tl.store(out + row * num_in + k, code * scale, mask=k < num_in)


def embedding_gpu(ids: torch.Tensor, w: GpuWeight, out: torch.Tensor) -> None:
    """ids int64 [T] -> out float32 [T, K]; arguments have been checked."""
    num_out, num_in = w.shape
    grid = (len(ids), triton.cdiv(num_in, _STEP.value))
    if isinstance(w, GpuDenseWeight):
        _dense_rows[grid](ids, w.matrix, out, w.unit, num_out, num_in, w.matrix.shape[1], num_warps=4, **EXACT)
        return
    if isinstance(w, GpuFp8Weight):
        padded_out, stride = w.codes.shape
        _fp8_rows[grid](
            ids, w.codes, w.scales, out, num_out, num_in, padded_out, stride, GROUP=FP8_GROUP, num_warps=4, **EXACT
        )
        return
    assert isinstance(w, GpuInt4Weight | GpuInt8Weight)
    _, padded_out, width = w.codes.shape
    _quantized_rows[grid](
        ids, w.codes, w.scales, out, w.unit, num_out, num_in, padded_out,
        BITS=w.bits, GROUP=w.group_size, WIDTH=width, HAS_MINIMUM=w.has_minimum, num_warps=4, **EXACT,
    )  # fmt: skip
