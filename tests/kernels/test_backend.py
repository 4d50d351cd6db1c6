"""Choosing a backend: what is asked for is what runs, or an error says why not."""

import sys

import pytest

import kernels
from kernels import _native
from kernels.backend import Backend, describe, resolve
from kernels.errors import KernelError


@pytest.mark.parametrize(("choice", "expected"), [("ref", Backend.REF), ("cpu", Backend.CPU), ("auto", Backend.CPU)])
def test_choices(choice, expected):
    """Each name gives its backend, and auto the native one."""
    assert expected is resolve(choice)


@pytest.mark.parametrize("choice", ["gpu", "cuda", "", "CPU"])
def test_what_is_not_there_is_refused(choice):
    """Unknown names and the missing GPU kernels are errors that say what there is."""
    with pytest.raises(KernelError, match="choose auto, cpu or ref"):
        resolve(choice)


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
    assert describe(backend) == {"kernels": "cpu", "isa": "portable", "threads": _native.num_threads()}


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
