"""Choosing a backend: what is asked for is what runs, or an error says why not."""

import subprocess
import sys

import pytest
import torch

import kernels
from kernels import _native
from kernels.backend import Backend, describe, device_of, resolve
from kernels.errors import KernelError


@pytest.mark.parametrize(("choice", "expected"), [("ref", Backend.REF), ("cpu", Backend.CPU), ("auto", Backend.CPU)])
def test_choices(choice, expected):
    """Each name gives its backend, and auto the native one."""
    assert expected is resolve(choice)


@pytest.mark.parametrize("choice", ["cuda", "", "CPU"])
def test_unknown_names_are_refused(choice):
    """An unknown name is an error that says what there is."""
    with pytest.raises(KernelError, match="choose auto, gpu, cpu or ref"):
        resolve(choice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    """Without a GPU, asking for one is a clear error, and nothing else takes its place."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelError, match=r"torch sees no GPU here; choose auto, cpu or ref"):
        resolve("gpu")


def test_the_interpreter_has_to_be_asked_for():
    """With TRITON_INTERPRET=1, gpu runs in the interpreter on the CPU and says so; auto doesn't choose it."""
    assert resolve("gpu") is Backend.GPU
    assert describe(Backend.GPU)["device"] == "interpreter"
    assert device_of(Backend.GPU) == torch.device("cpu")
    assert resolve("auto") is Backend.CPU


def test_a_missing_triton_names_the_extra(monkeypatch):
    """A GPU without Triton is an error that says what to install."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelError, match=r"install sluicegate\[gpu\]"):
        resolve("gpu")


def test_auto_takes_the_gpu_that_torch_sees(monkeypatch):
    """Where torch sees a GPU, auto is that GPU; one too old for the kernels is refused by name, not passed over."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert resolve("auto") is Backend.GPU
    assert describe(Backend.GPU)["device"] == "Card"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(KernelError, match=r"Card has capability \(7, 5\)"):
        resolve("auto")


def test_a_cpu_needs_no_triton():
    """A worker on the CPU imports none of the GPU's kernels."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import worker.process, kernels.matmul, kernels.placement, kernels.backend\n"
        "kernels.backend.resolve('cpu')\n"
        "print([m for m in sys.modules if m.startswith('kernels.') and m.endswith('gpu')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_missing_native_module_names_the_build(monkeypatch):
    """Without the native module there is no silent fallback to the reference."""
    monkeypatch.delattr(kernels, "_native")
    monkeypatch.setitem(sys.modules, "kernels._native", None)
    with pytest.raises(KernelError, match="native module is not built"):
        resolve("auto")


def test_isa_from_the_environment(monkeypatch):
    """SLUICEGATE_ISA forces a lower instruction set, and the log says so."""
    monkeypatch.setenv("SLUICEGATE_ISA", "portable")
    backend = resolve("cpu")
    threads = _native.num_threads()
    assert describe(backend) == {"kernels": "cpu", "isa": "portable", "threads": threads, "activations_bits": 16}


def test_bits_of_activations():
    """Native products can be told to round activations to 8 bits; other backends and other numbers are refused."""
    assert describe(resolve("cpu", 8))["activations_bits"] == 8
    assert describe(resolve("cpu"))["activations_bits"] == 16
    with pytest.raises(KernelError, match="activations_bits: 8 needs the cpu kernels, these are ref"):
        resolve("ref", 8)
    with pytest.raises(KernelError, match="activations_bits: must be 16 or 8, got 4"):
        resolve("cpu", 4)


def test_reference_describes_itself():
    """The reference has neither instruction set nor threads to report."""
    assert describe(Backend.REF) == {"kernels": "ref"}


def test_unknown_isa_is_refused(monkeypatch):
    """A misspelt SLUICEGATE_ISA stops the start and names the variable."""
    monkeypatch.setenv("SLUICEGATE_ISA", "avx3")
    with pytest.raises(KernelError, match="SLUICEGATE_ISA: unknown instruction set 'avx3'"):
        resolve("cpu")


def test_threads_from_the_environment(monkeypatch):
    """SLUICEGATE_THREADS sets the number of threads."""
    monkeypatch.setenv("SLUICEGATE_THREADS", "3")
    resolve("cpu")
    assert _native.num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "1025", "two", "", "1.5", "²"])
def test_bad_thread_counts_are_refused(monkeypatch, text):
    """A SLUICEGATE_THREADS that is no number from 1 to 1024 names the variable."""
    monkeypatch.setenv("SLUICEGATE_THREADS", text)
    with pytest.raises(KernelError, match="SLUICEGATE_THREADS"):
        resolve("cpu")
