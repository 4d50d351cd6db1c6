"""Memory on pages of 2 MB, where Linux gives them.

A step reads every weight once. With pages of 4 KB the processor looks up an address for every 64th line that it reads, and its prefetching
stops at each of their ends; a stream of weights is a quarter faster on large ones. Where the kernel has none to give, or isn't
Linux, everything stays as it is.
"""

import ctypes
import sys
from pathlib import Path

import torch

SIZE = 2 << 20
_HUGEPAGE, _COLLAPSE = 14, 25  # advice of madvise(2); collapsing came with Linux 6.1
_LEAST = 2 * SIZE


def ask_for(tensor: torch.Tensor) -> None:
    """Have a tensor's memory, not touched yet, come in large pages. It must lie on the CPU."""
    _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _HUGEPAGE)


def settle() -> None:
    """Move what this process has in memory of its own onto large pages: weights, when they're loaded. Addresses stay the same.

    What lies there already costs nothing, the rest a copy.
    """
    for first, end in _mappings():
        if end - first >= _LEAST:
            _advise(first, end, _HUGEPAGE)
            _advise(first, end, _COLLAPSE)


def _mappings() -> list[tuple[int, int]]:
    """Address ranges that are the process's own, readable and writable."""
    try:
        with Path("/proc/self/maps").open(encoding="ascii", errors="replace") as lines:
            fields = [line.split() for line in lines]
    except OSError:
        return []
    own = [f for f in fields if f[1] == "rw-p" and (len(f) == 5 or f[5] == "[heap]")]
    return [(int(first, 16), int(end, 16)) for first, end in (f[0].split("-") for f in own)]


def _advise(first: int, end: int, advice: int) -> None:
    """Advice on the whole large pages between two addresses. If it can't be taken that's no error: nothing depends on it but speed."""
    first, end = -(-first // SIZE) * SIZE, end // SIZE * SIZE
    if end > first and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice))
