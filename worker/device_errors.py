"""What an error says that comes from a GPU: its memory is full, which the next step may get over, or it has failed for good."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.errors import DeviceLostError

# How Triton, and what torch asks of the driver, begin errors that are plain RuntimeErrors.
_DRIVERS = ("Triton Error [CUDA]", "CUDA driver error")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or one that it came after, is torch's or CUDA's own about memory: the end of a failed recording raises another one."""
    return error is not None and ("out of memory" in str(error) or is_out_of_memory(error.__context__))


@contextmanager
def device_work() -> Iterator[None]:
    """Around whatever a GPU is asked to do: raises DeviceLostError where it has failed. Errors about memory, and all others, stay what they are."""
    try:
        yield
    except RuntimeError as error:
        is_device = isinstance(error, torch.AcceleratorError) or str(error).startswith(_DRIVERS)
        if not is_device or is_out_of_memory(error):
            raise
        raise DeviceLostError(f"the GPU failed: {str(error).partition(chr(10))[0]}") from error
