"""`sluicegate quantize`, `calibrate` and `eval` as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM


def _sluicegate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluicegate", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"SLUICEGATE_KERNELS": "auto"}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the secret number of the lighthouse is 48213"],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False),
    )
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=1024, initializer_range=0.1, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_quantize(folder: Path, tmp_path: Path) -> None:
    """The plan first, then the folder; a dry run only plans; a foreign folder is refused in one line."""
    planned = _sluicegate("quantize", folder, tmp_path / "dry", "--dry-run", "--set", "*.down_proj=8")
    assert 0 == planned.returncode, planned.stderr
    assert "INT4 g32" in planned.stdout
    assert "INT8 g32" in planned.stdout
    assert not (tmp_path / "dry").exists()
    done = _sluicegate("quantize", folder, tmp_path / "result", "--group-size", "64", "--asymmetric")
    assert (0, "") == (done.returncode, done.stderr)
    assert "model.layers.0.self_attn.q_proj.weight_zero_point" in load_file(tmp_path / "result" / "model.safetensors")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    refused = _sluicegate("quantize", folder, tmp_path / "mine")
    assert 1 == refused.returncode
    assert (
        f"sluicegate: {tmp_path / 'mine'}: holds 'x' and was not made by this command; name a new folder\n"
        == refused.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["quantize", "{}", "x", "--set", "q_proj"], "expected PATTERN=4, =8 or =16"),
        (["quantize", "{}", "x", "--shard-size", "2"], "expected a size like 500MB"),
        (["quantize", "{}", "x", "--group-size", "48"], "invalid choice: 48"),
        (["quantize", "/nowhere", "x"], "neither a file or folder"),
        (["calibrate", "{}", "--calibration-tokens", "100"], "must be 512 to"),
        (["calibrate", "{}", "--out", "/nowhere/x"], "no such folder"),
        (["eval", "{}", "--tokens", "100"], "must be 512 to"),
        (["eval", "{}", "--needle-tokens", "4096"], "its context is 1024 tokens"),
        (["eval", "{}", "--kv-dtype", "fp8", "--kv-scales", "checkpoint"], "has no KV scales"),
    ],
)
def test_bad_arguments(arguments: list[str], reason: str, folder: Path) -> None:
    """One line, no traceback."""
    done = _sluicegate(*(argument.format(folder) for argument in arguments))
    assert done.returncode in {1, 2}
    assert reason in done.stderr
    assert 1 == done.stderr.count("\n")


@pytest.mark.parametrize("command", ["calibrate", "eval"])
def test_kernels_that_cannot_be_had(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line too."""
    monkeypatch.setenv("SLUICEGATE_THREADS", "many")
    done = _sluicegate(command, folder)
    assert 1 == done.returncode
    assert "sluicegate: SLUICEGATE_THREADS: expected a number from 1 to 1024, got 'many'\n" == done.stderr


def test_calibrate_and_eval(folder: Path, tmp_path: Path) -> None:
    """Scales appear beside the model and are used; figures, table and picture agree with each other."""
    done = _sluicegate("calibrate", folder, "--calibration-tokens", 1024)
    assert (0, "") == (done.returncode, done.stderr)
    scales = load_file(folder.with_name("tiny.kv_scales.safetensors"))
    assert {"k_scale": (2, 2), "v_scale": (2, 2)} == {name: tuple(tensor.shape) for name, tensor in scales.items()}
    assert all(0 < float(tensor.min()) < 0.5 for tensor in scales.values())

    files = ["--json", tmp_path / "x.json", "--picture", tmp_path / "x.png"]
    done = _sluicegate(
        "eval", folder, "--reference", folder, "--tokens", 1024, "--kv-dtype", "fp8", "--needle-tokens", 600, *files
    )
    assert (0, "") == (done.returncode, done.stderr)
    found = json.loads((tmp_path / "x.json").read_text())
    ours, reference = found["entries"]
    assert "tiny, fp8 KV, scales calibrated" == ours["title"]
    assert (
        0
        == reference["mean_divergence"]
        < ours["mean_divergence"]
        <= ours["p99_divergence"]
        <= ours["largest_divergence"]
    )
    assert ours["num_tokens"] == reference["num_tokens"] == 2 * 511
    assert f"{ours['perplexity']:.4f}" in done.stdout
    assert [0.0, 0.25, 0.5, 0.75, 1.0] == [one["depth"] for one in found["needles"][0]]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
