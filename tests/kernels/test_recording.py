"""Op calls that are noted down compute later, in their order, on the tensors as they are then."""

import threading

import pytest
import torch

from kernels.backend import Backend, resolve
from kernels.errors import KernelError
from kernels.recording import Recording
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul


@pytest.fixture
def cpu() -> Backend:
    return resolve("cpu")


def test_a_recorded_call_computes_when_it_is_run(cpu, poisoned):
    """Nothing is written while recording; each run reads what the inputs hold then."""
    x, out, recording = torch.randn(3, 16), poisoned(3, 8), Recording()
    with recording.record():
        silu_mul(x, out, backend=cpu)
    assert 1 == len(recording)
    assert bool(torch.isnan(out).all())
    for _ in range(2):
        x.copy_(torch.randn(3, 16))
        recording.run()
        assert torch.equal(silu_mul(x, backend=cpu), out)


def test_calls_run_in_order(cpu):
    """The output of one is the input of the next."""
    x, hidden, out, recording = torch.randn(2, 32), torch.empty(2, 16), torch.empty(2, 16), Recording()
    weight = torch.ones(16)
    with recording.record():
        silu_mul(x, hidden, backend=cpu)
        rms_norm(hidden, weight, 1e-5, out=out, backend=cpu)
    recording.run()
    assert torch.equal(rms_norm(silu_mul(x, backend=cpu), weight, 1e-5, backend=cpu), out)


def test_after_an_error_calls_compute_again(cpu):
    """A recording that fails half-way does not swallow later calls."""
    recording = Recording()
    with pytest.raises(KernelError), recording.record():
        silu_mul(torch.zeros(2, 3), backend=cpu)
    assert torch.equal(torch.zeros(1, 2), silu_mul(torch.zeros(1, 4), backend=cpu))
    assert 0 == len(recording)


def test_other_threads_compute(cpu):
    """Recording concerns the thread that records."""
    results, recording = [], Recording()
    with recording.record():
        thread = threading.Thread(target=lambda: results.append(silu_mul(torch.zeros(1, 4), backend=cpu)))
        thread.start()
        thread.join()
    assert 0 == len(recording)
    assert torch.equal(torch.zeros(1, 2), results[0])
