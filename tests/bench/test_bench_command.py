"""`sluicegate bench` from the command line, over the real model, in the smallest form of each measurement."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "sluicegate", "bench", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(400)
def test_engine_with_peers_that_are_not_installed(smollm2_path: Path, tmp_path: Path) -> None:
    """Our engine is measured in two KV formats and with 8-bit activations, with a real worker's start; peers are listed with what is to be done."""
    done = bench("engine", "--rows", "tiny", "--peers", "--peers-dir", str(tmp_path / "none"), "--out", str(tmp_path))
    assert 0 == done.returncode, done.stderr

    found = json.loads((tmp_path / "peers.json").read_text())
    engines = {engine["name"]: engine for engine in found["engines"]}

    assert [
        "sluicegate",
        "sluicegate-fp8",
        "sluicegate8",
        "llama.cpp",
        "llama.cpp-plain",
        "openvino",
        "vllm",
    ] == list(engines)
    for name in ("sluicegate", "sluicegate-fp8", "sluicegate8"):
        assert all(cell["median"] > 0 for cell in engines[name]["rows"].values()), engines[name]
        assert 3 == len(engines[name]["rows"])
        assert engines[name]["sizes"]["weights"] <= smollm2_path.stat().st_size
    assert engines["sluicegate"]["sizes"]["kv"] == 2 * engines["sluicegate-fp8"]["sizes"]["kv"]
    assert all("make bench-peers" in engines[name]["unavailable"] for name in ("llama.cpp", "openvino", "vllm"))
    assert 1 == len(found["worker"]["ready_s"])
    assert found["worker"]["torch_bytes"] < found["worker"]["resident_bytes"] <= found["worker"]["peak_bytes"]
    assert (tmp_path / "peers.md").read_text() == done.stdout.removesuffix("\n")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(400)
def test_quality(smollm2_path: Path, tmp_path: Path) -> None:
    """512 tokens: our engine is close to float32, the closer the finer its keys, values and activations, and never equal."""
    done = bench("quality", "--tokens", "512", "--out", str(tmp_path))
    assert 0 == done.returncode, done.stderr

    truth, fp16, bf16, fp8, narrow = json.loads((tmp_path / "quality.json").read_text())

    assert 511 == truth["num_tokens"]
    assert 0 == truth["mean_divergence"]
    assert bf16["perplexity"] == pytest.approx(truth["perplexity"], rel=0.01)
    assert fp8["perplexity"] == pytest.approx(truth["perplexity"], rel=0.03)
    assert 0 < bf16["mean_divergence"] < 2e-3
    assert 0 < fp16["mean_divergence"] < bf16["mean_divergence"] < fp8["mean_divergence"]
    assert narrow["perplexity"] == pytest.approx(truth["perplexity"], rel=0.05)
    assert bf16["mean_divergence"] < narrow["mean_divergence"] < 0.2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["engine", "--model", "/nowhere/x.gguf"], "neither a file or folder"),
        (["engine", "--rounds", "0"], "must be 1 to 100"),
        (["quality", "--tokens", "100"], "must be from 512"),
    ],
)
def test_bad_arguments(arguments: list[str], reason: str, smollm2_path: Path, tmp_path: Path) -> None:
    """One line, no traceback."""
    done = bench(*arguments, *(["--out", str(tmp_path)] if "--out" not in arguments else []))

    assert 0 < done.returncode < 3
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(400)
def test_nothing_is_left_running(smollm2_path: Path, tmp_path: Path) -> None:
    """A SIGTERM in the middle of a run ends the engines' processes too."""
    command = [sys.executable, "-m", "sluicegate", "bench", "engine", "--rows", "tiny", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert "ready after" in process.stderr.readline()
        tasks = Path(f"/proc/{process.pid}/task")
        engines = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        process.terminate()
        code = process.wait()

    assert 130 == code
    assert engines
    end_s = time.monotonic() + 10  # the kernel may take a moment to reap them
    while [pid for pid in engines if Path(f"/proc/{pid}").exists()] and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
