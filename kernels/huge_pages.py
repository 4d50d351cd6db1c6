"""Memory on pages of 2 MB, where Linux gives them.

A step reads every weight once. With pages of 4 KB the processor looks up an address for every 64th line that it reads, and its prefetching
stops at each of their ends; a stream of weights is a quarter faster on large ones. Where the kernel has none to give, or isn't
Linux, everything stays as it is.
"""

import ctypes
import math
import sys

import torch

SIZE = 2 << 20
_HUGEPAGE = 14  # advice of madvise(2)
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 128


class WeightMemory:
    """Memory on large pages, given out piece by piece: alone, a matrix would leave much of a page empty, or lie on small ones.

    Pages that nobody has written to yet take no memory. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of unknown content. Its memory goes back to the system when all tensors of the same chunk are gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        chunk, first = self._chunk, self._used
        if first + num_bytes > len(chunk):
            chunk, first = _chunk(max(num_bytes, _CHUNK_BYTES)), 0
        end = first + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if len(chunk) - end >= len(self._chunk) - self._used or chunk is self._chunk:  # else the old one has more left
            self._chunk, self._used = chunk, end
        return chunk[first : first + num_bytes].view(dtype).view(shape)


def ask_for(tensor: torch.Tensor) -> None:
    """Have a tensor's memory, not touched yet, come in large pages. It must lie on the CPU."""
    _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _HUGEPAGE)


def _chunk(num_bytes: int) -> torch.Tensor:
    """Whole large pages, uint8, at least as many bytes."""
    num_bytes = -(-num_bytes // SIZE) * SIZE
    memory = torch.empty(num_bytes + SIZE, dtype=torch.uint8)
    first = -memory.data_ptr() % SIZE
    chunk = memory[first : first + num_bytes]
    ask_for(chunk)
    return chunk


def _advise(first: int, end: int, advice: int) -> None:
    """Advice on the whole large pages between two addresses. If it can't be taken that's no error: nothing depends on it but speed."""
    first, end = -(-first // SIZE) * SIZE, end // SIZE * SIZE
    if end > first and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice))
