"""Memory of large bodies goes back to the system. glibc would otherwise keep it: after the first large block it serves the next ones from its heap."""

import asyncio
import ctypes

LARGE_BYTES = 256 * 1024
TRIM_EVERY_S = 5.0
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def keep_heap_small() -> None:
    """Serve large blocks by pages of their own, from now on."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have their own ways
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * LARGE_BYTES)


async def keep_trimmed() -> None:
    """Trim now and then, until cancelled."""
    while True:
        await asyncio.sleep(TRIM_EVERY_S)
        trim()


def trim() -> None:
    """Give back what is free between small blocks, too: a millisecond's work."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
