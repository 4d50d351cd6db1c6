"""What loading leaves behind in the heap: buffers that tensors were read into, which glibc would keep."""

import ctypes


def release_free_memory() -> None:
    """Give the heap's free memory back to the system, where the C library has a way; a millisecond or a few."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
