"""Op calls noted down once and run again in one native call: what CUDA graphs are on a GPU.

Thirty layers of ten ops cost milliseconds in Python alone. While a recording is made, the ops of the CPU backend check their arguments
and note down addresses and sizes instead of computing; everything else a model does (plain torch, branches) happens once, then and never
again. So a recorded pass consists of ops alone, and reads and writes tensors that stay where they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Recording:
    """A sequence of op calls. Whoever records keeps the tensors alive that they work on."""

    def __init__(self) -> None:
        from kernels import _native

        self._program = _native.Program()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Ops that this thread calls inside are added, and not computed."""
        from kernels import _native

        _native.record(self._program)
        try:
            yield
        finally:
            _native.record(None)

    def __len__(self) -> int:
        return len(self._program)

    def run(self) -> None:
        """Compute all calls in their order. The interpreter's lock is released meanwhile."""
        self._program.run()
