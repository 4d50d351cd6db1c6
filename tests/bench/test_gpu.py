"""The script that checks and times kernels on a GPU: its checks, run in Triton's interpreter, and what it says without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_model
from bench.gpu import check, every_case
from bench.gpu_cases import Case, Sizes
from bench.synthetic_checkpoint import Shape, write_checkpoint
from kernels.backend import Backend
from worker.model.load import load_model

pytestmark = pytest.mark.timeout(400)  # the interpreter on a busy machine

ROOT = Path(__file__).parents[2]
SMALL = Sizes(hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, context=36, many=20, streams=3, batches=(1, 17))

TINY = Shape(hidden=64, ffn=96, layers=1, heads=4, kv_heads=2, vocabulary=260, context=64, group=32)
FEW = gpu_model.ModelSizes(streams=(1, 3), context=2, prompt=5, num_steps=1, num_checked=10, num_exact=4)


@pytest.mark.usefixtures("ordered_products")
def test_every_check_passes_in_the_interpreter(capsys):
    """Each case runs, agrees with its reference, and gives rows the same bits in every batch."""
    names = []
    for case in every_case(SMALL, torch.device("cpu")):
        names.append(case.name)
        assert check(case), capsys.readouterr().out
    for op in (
        "int4",
        "int8",
        "bf16",
        "attention decode",
        "attention prefill",
        "kv_write",
        "rms_norm",
        "silu_mul",
        "rotary",
        "verified attention decode",
        "verified attention prefill",
        "verify_pages",
    ):
        assert any(name.startswith(op) for name in names)


def test_a_check_can_fail(capsys):
    """An error beyond the tolerance, NaN, or bits that depend on the batch are failures."""
    fine = Case("op", 1e-3, 1, lambda: None, lambda: 0.0, lambda: True)
    assert check(fine)
    for bad in (
        Case("op", 1e-3, 1, lambda: None, lambda: 2e-3, lambda: True),
        Case("op", 1e-3, 1, lambda: None, lambda: float("inf"), lambda: True),
        Case("op", 1e-3, 1, lambda: None, lambda: 0.0, lambda: False),
    ):
        assert not check(bad)
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("interpreting", "message"), [("0", "torch sees no GPU here"), ("1", "interpreter is no GPU")])
def test_without_a_gpu_it_says_so_in_one_line(interpreting, message):
    """No table, no traceback: one line and a failure."""
    environment = os.environ | {"TRITON_INTERPRET": interpreting}
    command = [sys.executable, "-m", "bench.gpu"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one of the kind that is made up on a GPU."""
    folder = tmp_path_factory.mktemp("gpu") / "tiny"
    write_checkpoint(folder, TINY)
    return folder


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The script believes that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)
    return monkeypatch


@pytest.mark.usefixtures("ordered_products")
def test_a_model_is_checked_and_timed(card, checkpoint, capsys):
    """The part with a whole model, in small: right, the same bits in every batch, a row of the table for each size."""
    card.setattr(sys, "argv", ["gpu", "--only", "model"])
    card.setattr(gpu_model, "made_up", lambda folder: checkpoint)
    card.setattr(gpu_model, "ModelSizes", lambda: FEW)
    gpu.main()
    printed = capsys.readouterr().out
    assert "ok   whole model: error of logits" in printed
    for name in ("decode, 1 streams at 2", "decode, 3 streams at 2", "prompt of 5"):
        assert f"| {name} | " in printed
    assert "attention" not in printed


def test_a_wrong_model_is_not_timed(card, checkpoint, monkeypatch, capsys):
    """Weights that differ from the reference's, or bits that depend on the batch, end the run before the table."""
    loaded, reference = load_model(checkpoint, Backend.GPU), load_model(checkpoint, Backend.REF)
    exact = torch.randn(4, 260)
    for logits, is_same in ((exact * 1.02, True), (exact, False), (exact * float("nan"), True)):
        found = iter([exact, logits[:2], logits[2:3], logits[3:]])
        with monkeypatch.context() as patch:
            patch.setattr(gpu_model.Passes, "run", lambda self, parts, found=found, **options: next(found))
            patch.setattr(gpu_model, "has_same_bits", lambda loaded, sizes, is_same=is_same: is_same)
            assert not gpu_model.check(loaded, reference, FEW)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_model, "check", lambda *_: False)
        with pytest.raises(SystemExit, match="a check failed, so nothing is timed"):
            gpu.measure_model(checkpoint, Backend.GPU, 1e9, FEW)
    assert "tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--model", "/no/such/model"], "bench-gpu: /no/such/model: no such file or folder"), (["--only", "half"], "2")],
)
def test_bad_arguments_are_one_line(card, capsys, arguments, message):
    """Before anything is measured."""
    card.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as raised:
        gpu.main()
    assert message == str(raised.value.code)
    assert "" == capsys.readouterr().out


def test_a_model_that_does_not_load_is_one_line(card, tmp_path, capsys):
    """What is wrong with it, and no traceback."""
    (tmp_path / "config.json").write_text("{}")
    card.setattr(sys, "argv", ["gpu", "--only", "model", "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^bench-gpu: .*config\.json"):
        gpu.main()
