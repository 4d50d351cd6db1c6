"""A file of weights, opened once and read in pieces.

Bytes are read into fresh memory rather than mapped: mapped pages of a checkpoint would count as this process' memory beside the packed
weights, and a file that is cut while it is mapped would kill the process.
"""

import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.model.errors import ModelError

_READ_BYTES = 64 << 20


class OpenedFile:
    """Closed with this object. Raises ModelError if the file can't be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Some bytes, uint8 [num_bytes]. Raises ModelError if the file has none there any more."""
        buffer = np.empty(num_bytes, dtype=np.uint8)
        view, done = memoryview(buffer.data), 0
        try:
            while done < num_bytes:
                count = os.preadv(self.descriptor, [view[done : done + _READ_BYTES]], start + done)
                if not count:
                    raise ModelError(f"{self.path}: ends at byte {start + done}: it was cut while it was read")
                done += count
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror}") from None
        return buffer
