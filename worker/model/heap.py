"""What loading leaves behind in the heap: buffers of some hundred KB each, which glibc keeps for later blocks of the kind that none will ask for."""

import ctypes


def release_free_memory() -> None:
    """Give the heap's free memory back to the system, where the C library has a way; some milliseconds, once."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
