"""The digest of a model's files, computed by threads of its own while the loader reads the same files.

What a model is bound to in caches is a sha256 over all its bytes. Computed first, it would double the time of a load.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from worker.model.errors import ModelError

_READ_BYTES = 4 << 20
_MAX_THREADS = 8


class FileDigest:
    """A hex sha256 over some files, to be started, and asked for when everything else is done.

    `combine` makes it of the files' own digests, in their order.
    """

    def __init__(self, paths: Sequence[Path], combine: Callable[[Sequence[bytes]], str]) -> None:
        self._paths = paths
        self._combine = combine
        self._stopped = threading.Event()
        self._waiting = list(enumerate(paths))
        self._found: dict[int, bytes | ModelError] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to read. The threads end with the files, with `stop`, or with the process, which doesn't wait for them."""
        if not self._threads:
            count = max(1, min(len(self._paths), (os.cpu_count() or 1) // 2, _MAX_THREADS))
            self._threads = [threading.Thread(target=self._work, name="digest", daemon=True) for _ in range(count)]
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Read no further: nobody will ask."""
        self._stopped.set()

    def result(self) -> str:
        """The digest. Raises ModelError if a file can't be read."""
        self.start()
        for thread in self._threads:
            thread.join()
        found = [self._found[index] for index in range(len(self._paths))]
        for item in found:
            if isinstance(item, ModelError):
                raise item
        return self._combine([item for item in found if isinstance(item, bytes)])

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                index, path = self._waiting.pop(0)
            except IndexError:
                return
            try:
                self._found[index] = self._digest(path)
            except OSError as error:
                self._found[index] = ModelError(f"{path}: cannot be read: {error.strerror}")

    def _digest(self, path: Path) -> bytes:
        state, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
        view = memoryview(buffer)
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not self._stopped.is_set():
                state.update(view[:count])
        return state.digest()


def folder_digest(paths: Sequence[Path]) -> FileDigest:
    """Over the names and contents of files."""

    def combine(digests: Sequence[bytes]) -> str:
        total = hashlib.sha256()
        for path, digest in zip(paths, digests, strict=True):
            total.update(path.name.encode() + b"\0" + digest)
        return total.hexdigest()

    return FileDigest(paths, combine)


def single_digest(path: Path) -> FileDigest:
    """Over one file's content."""
    return FileDigest([path], lambda digests: digests[0].hex())
