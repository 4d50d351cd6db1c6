"""Which implementation computes: chosen once, passed to every op, never fallen back from in silence."""

import os
from enum import StrEnum

import torch

from kernels.errors import KernelError

_OLDEST_GPU = (8, 0)  # bfloat16 on tensor cores


class Backend(StrEnum):
    """`REF` is plain torch and slow, `CPU` native code, `GPU` Triton."""

    REF = "ref"
    CPU = "cpu"
    GPU = "gpu"


def resolve(choice: str, activations_bits: int = 16) -> Backend:
    """The backend for `auto`, `ref`, `cpu` or `gpu`; for CPU also picks the instruction set, and leaves torch itself one thread.

    `auto` is the GPU where torch sees one, else the CPU. SLUICEGATE_ISA (portable, avx2, avx512) and SLUICEGATE_THREADS override what is
    detected. With TRITON_INTERPRET=1, `gpu` runs Triton's interpreter on the CPU, for tests. `activations_bits` is to how many bits, 16 or 8,
    native quantized products round their activations; the other backends round none to integers and take 16 only. Like the instruction
    set it's the process's. Raises KernelError if the choice can't be had here.
    """
    backend = _resolve(choice, activations_bits)
    if activations_bits != 16 and backend is not Backend.CPU:
        raise KernelError(f"activations_bits: {activations_bits} needs the cpu kernels, these are {backend}")
    return backend


def _resolve(choice: str, activations_bits: int) -> Backend:
    if choice == "ref":
        return Backend.REF
    if activations_bits not in {8, 16}:
        raise KernelError(f"activations_bits: must be 16 or 8, got {activations_bits}")
    if choice not in {"auto", "cpu", "gpu"}:
        raise KernelError(f"kernels: unknown backend {choice!r}; choose auto, gpu, cpu or ref")
    if choice == "gpu" or (choice == "auto" and torch.cuda.is_available() and not _is_interpreting()):
        _check_gpu()
        return Backend.GPU
    try:
        from kernels import _native
    except ImportError as error:
        raise KernelError(f"kernels: the native module is not built ({error}); run `make setup`") from None
    try:
        _native.select(os.environ.get("SLUICEGATE_ISA", ""), activations_bits)
    except ValueError as error:
        raise KernelError(f"SLUICEGATE_ISA: {error}") from None
    _set_threads(os.environ.get("SLUICEGATE_THREADS"))
    # After an op torch's own threads wait for the next one with busy cores, for milliseconds: the kernels' threads would share theirs.
    torch.set_num_threads(1)
    return Backend.CPU


def _set_threads(text: str | None) -> None:
    from kernels import _native

    if text is None:
        return
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise KernelError(f"SLUICEGATE_THREADS: expected a number from 1 to 1024, got {text[:20]!r}")
    if int(text) != _native.num_threads():
        _native.set_num_threads(int(text))


def _is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}


def _check_gpu() -> None:
    """Raise KernelError if Triton or a GPU that it can use is missing."""
    if not torch.cuda.is_available() and not _is_interpreting():
        raise KernelError("kernels: torch sees no GPU here; choose auto, cpu or ref")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise KernelError(
            f"kernels: a GPU needs Triton ({error}); install sluicegate[gpu], or choose cpu or ref"
        ) from None
    if not _is_interpreting() and (version := torch.cuda.get_device_capability()) < _OLDEST_GPU:
        name = torch.cuda.get_device_name()
        raise KernelError(f"kernels: {name} has capability {version}, less than {_OLDEST_GPU}; choose cpu or ref")


def device_of(backend: Backend) -> torch.device:
    """Where this backend's tensors live."""
    return torch.device("cuda" if backend is Backend.GPU and not _is_interpreting() else "cpu")


def describe(backend: Backend) -> dict[str, str | int]:
    """What was chosen, for the log."""
    if backend is Backend.REF:
        return {"kernels": "ref"}
    if backend is Backend.GPU:
        import triton

        device = "interpreter" if _is_interpreting() else torch.cuda.get_device_name()
        return {"kernels": "gpu", "device": device, "triton": str(triton.__version__)}
    from kernels import _native

    return {
        "kernels": "cpu",
        "isa": _native.selected(),
        "threads": _native.num_threads(),
        "activations_bits": _native.activations_bits(),
    }
