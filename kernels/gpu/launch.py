"""How kernels are compiled and started, for every op alike."""

import functools

import torch
import triton
import triton.language as tl

from kernels.gpu_weights import ROW_ALIGNMENT

# A multiplication and an addition become one instruction only where the kernel says so: otherwise the compiler's choice, which may
# differ between two variants of a kernel, would decide about a row's bits.
EXACT = {"enable_fp_fusion": False}

OUT_TILE = ROW_ALIGNMENT
MAX_ROW_TILE = 64
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def operand(numbers):
    """A tile as a product's operand. Triton's interpreter (3.9) multiplies bfloat16 as if it were integers: there it's widened, which is exact."""
    return numbers.to(tl.float32) if IS_INTERPRETED and numbers.dtype == tl.bfloat16 else numbers


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; one where there's none, so that small tests walk both ways of sharing work."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> int:
    """Major and minor version of a device's instruction set as one number: 80, 90, 100. The interpreter is an 80."""
    if device.type == "cpu":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def row_tile(num_rows: int, version: int) -> int:
    """Rows of a product's tile, a power of two.

    Where products run on warp-level instructions (mma.sync), a row's instruction is the same in each tile, so few rows get a small one.
    Hopper's and Blackwell's own instructions are named after the tile's width, and nothing says that two of them add alike:
    there one tile serves all.
    """
    has_tile_instructions = 90 <= version < 120
    return 16 if num_rows <= 16 and not has_tile_instructions else MAX_ROW_TILE
