"""Which implementation computes: chosen once, passed to every op, never fallen back from in silence."""

import os
from enum import StrEnum

from kernels.errors import KernelError


class Backend(StrEnum):
    """`REF` is plain torch and slow, `CPU` native code."""

    REF = "ref"
    CPU = "cpu"


def resolve(choice: str) -> Backend:
    """The backend for `auto`, `ref`, `cpu` or `gpu`; for CPU also picks the instruction set.

    SLUICEGATE_ISA (portable, avx2, avx512) and SLUICEGATE_THREADS override what is detected. Raises KernelError if the choice can't be
    had here.
    """
    if choice == "ref":
        return Backend.REF
    if choice == "gpu":
        raise KernelError("kernels: this build has no GPU kernels; choose auto, cpu or ref")
    if choice not in {"auto", "cpu"}:
        raise KernelError(f"kernels: unknown backend {choice!r}; choose auto, cpu or ref")
    try:
        from kernels import _native
    except ImportError as error:
        raise KernelError(f"kernels: the native module is not built ({error}); run `make setup`") from None
    try:
        _native.select(os.environ.get("SLUICEGATE_ISA", ""))
    except ValueError as error:
        raise KernelError(f"SLUICEGATE_ISA: {error}") from None
    _set_threads(os.environ.get("SLUICEGATE_THREADS"))
    return Backend.CPU


def _set_threads(text: str | None) -> None:
    from kernels import _native

    if text is None:
        return
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise KernelError(f"SLUICEGATE_THREADS: expected a number from 1 to 1024, got {text[:20]!r}")
    if int(text) != _native.num_threads():
        _native.set_num_threads(int(text))


def describe(backend: Backend) -> dict[str, str | int]:
    """What was chosen, for the log."""
    if backend is Backend.REF:
        return {"kernels": "ref"}
    from kernels import _native

    return {"kernels": "cpu", "isa": _native.selected(), "threads": _native.num_threads()}
