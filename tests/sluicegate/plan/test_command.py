"""`sluicegate plan` as typed: text, JSON, pictures, and one clear line for what cannot be."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluicegate.command import main
from sluicegate.errors import CommandError
from sluicegate.plan.known_models import KNOWN
from sluicegate.plan.parts import parts
from sluicegate.plan.picture import segments
from sluicegate.plan.read_config import read_shape

LLAMA = KNOWN["llama-3.2-1b"]
KIMI = KNOWN["kimi-k2.6"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures that one looks for, in words."""
    assert 0 == main(["plan", "kimi-k2.6", "--count", "8", "--kv", "fp8", "--gpu-hour", "2.5"])
    out = capsys.readouterr().out
    for words in (
        "1,026.41 B parameters",
        "31.69 B for each token",
        "35,136 bytes a token",
        "8 x NVIDIA H200",
        "int4-g32/bf16",
        "per 1M",
        "requests that fit",
    ):
        assert words in out, words


def test_json_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU's pieces are its usable memory; price times rate is the price of the GPUs."""
    assert 0 == main(
        [
            "plan",
            "qwen3-30b-a3b",
            "--gpu",
            "h100",
            "--count",
            "4",
            "--tp",
            "2",
            "--concurrency",
            "64",
            "--gpu-hour",
            "2",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    per_gpu = found["per_gpu"]
    assert per_gpu["usable_bytes"] == pytest.approx(
        sum(per_gpu["weights_bytes"].values()) + per_gpu["kv_pool_bytes"], abs=20
    )
    assert sum(found["model"]["parameters"].values()) == found["model"]["num_parameters"]
    assert [1, 32] == [decode["batch"] for decode in found["decode_floor"]], "64 requests are 32 for each of two groups"
    for decode in found["decode_floor"]:
        an_hour = decode["cost_per_million_tokens"] * decode["tokens_per_second"] * 3600 / 1e6
        assert 8 == pytest.approx(an_hour)


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_picture(ending: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn in the format that the name says, also of what does not fit."""
    fits, lacks = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    assert 0 == main(["plan", "qwen3-8b", "--gpu", "l40s", "--picture", str(fits)])
    assert 1 == main(["plan", "qwen3-8b", "--gpu", "8:100", "--picture", str(lacks)])
    assert fits.read_bytes().startswith(start)
    assert lacks.read_bytes().startswith(start)


def test_the_picture_shows_all_of_the_memory() -> None:
    """Its pieces are the whole of a GPU, or go beyond by what is missing."""
    from argparse import Namespace

    from sluicegate.plan.command import make_plan

    given = {
        "model": "llama-3.1-8b", "weights": None, "kv": "fp16", "gpu": "rtx-4090", "count": 1, "tp": None, "context": 4096, "concurrency": 2,
        "memory_fraction": 0.9, "page_size": 16, "gpu_hour": None, "mtp": False,
    }  # fmt: skip
    plan = make_plan(Namespace(**given))
    assert plan.card.memory_bytes == pytest.approx(sum(size for _, size, _ in segments(plan)))
    lacks = make_plan(Namespace(**{**given, "concurrency": 1000}))
    assert lacks.usable_bytes + lacks.missing_bytes_per_gpu == pytest.approx(
        sum(size for _, size, _ in segments(lacks))
    )


BAD_FLAGS = {
    "no such model 'nope'": ["nope"],
    "--gpu h900: no such card": ["qwen3-8b", "--gpu", "h900"],
    "--gpu 96: no such card": ["qwen3-8b", "--gpu", "96"],
    "--gpu nan:1: no such card": ["qwen3-8b", "--gpu", "nan:1"],
    "--gpu -1:1: no such card": ["qwen3-8b", "--gpu=-1:1"],
    "--weights int5: no format 'int5'": ["qwen3-8b", "--weights", "int5"],
    "--weights int4-g32/x: no format 'x'": ["kimi-k2.6", "--weights", "int4-g32/x"],
    "--weights /: no format ''": ["kimi-k2.6", "--weights", "/"],
    "has no routed experts": ["qwen3-8b", "--weights", "int4-g32/fp8"],
    "--count 6 is no multiple of --tp 4": ["qwen3-8b", "--count", "6", "--tp", "4"],
    "--tp 5 does not divide the 32 heads of qwen3-8b": ["qwen3-8b", "--count", "5"],
    "--context 50000 is longer than qwen3-8b allows (40960)": ["qwen3-8b", "--context", "50000"],
    "--picture": ["qwen3-8b", "--picture", "/nowhere/at/all.png"],
    "Format 'xyz' is not supported": ["qwen3-8b", "--picture", "/tmp/a.xyz"],
}


@pytest.mark.parametrize("words", BAD_FLAGS)
def test_bad_flags(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the flag; exit code 1."""
    assert 1 == main(["plan", *BAD_FLAGS[words]])
    err = capsys.readouterr().err
    assert words.replace("such model", "model") in err
    assert 1 == err.count("\n")


@pytest.mark.parametrize(
    "flags",
    [["--memory-fraction", "0"], ["--memory-fraction", "1.1"], ["--memory-fraction", "nan"], ["--gpu-hour", "-1"], ["--gpu-hour", "x"], ["--count", "0"], ["--kv", "fp4"], ["--page-size", "0"], ["--concurrency", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_flags_out_of_range(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Told by the parser, with the flag's name; exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "qwen3-8b", *flags])
    assert 2 == ended.value.code
    assert flags[0] in capsys.readouterr().err


BAD_CONFIGS: dict[str, tuple[Any, str]] = {
    "a list": ([], "must be a JSON object"),
    "null": (None, "must be a JSON object"),
    "no family": ({}, "model_type must be a text, got None"),
    "another family": ({**LLAMA, "model_type": "mamba2"}, "model_type 'mamba2' is not supported"),
    "no layers": ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
    "too many layers": ({**LLAMA, "num_hidden_layers": 10**400}, "num_hidden_layers must be a whole number from 1"),
    "a text for a number": ({**LLAMA, "hidden_size": "2048"}, "hidden_size must be a whole number"),
    "a truth for a number": ({**LLAMA, "hidden_size": True}, "hidden_size must be a whole number"),
    "a fraction for a number": ({**LLAMA, "vocab_size": 1.5}, "vocab_size must be a whole number"),
    "a missing number": ({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, "intermediate_size is missing"),
    "uneven heads": ({**LLAMA, "num_key_value_heads": 5}, "32 heads are no multiple of 5 kv heads"),
    "a number for a truth": ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    "biases that are not counted": ({**LLAMA, "mlp_bias": True}, "mlp_bias is not supported for llama"),
    "biases of latents": ({**KIMI, "attention_bias": True}, "attention_bias is not supported for kimi_k2"),
    "more experts chosen than there are": ({**KIMI, "num_experts_per_tok": 500}, "num_experts_per_tok 500 is more than 384 experts"),
    "kinds of too few layers": ({**KIMI, "mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 61 texts"),
    "layers that are no numbers": ({**KNOWN["qwen3-30b-a3b"], "mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of whole numbers"),
    "more layers than any model has": ({**KNOWN["qwen3-30b-a3b"], "num_hidden_layers": 1025, "mlp_only_layers": [5] * 9}, "num_hidden_layers must be"),
    "no text part": ({"model_type": "kimi_k25"}, "text_config: must be a JSON object"),
    "a quantization that is no object": ({**LLAMA, "quantization_config": "fp8"}, "quantization_config: must be a JSON object"),
    "a quantization without a name": ({**LLAMA, "quantization_config": {}}, "quant_method must be a text"),
    "an unknown quantization": ({**LLAMA, "quantization_config": {"quant_method": "hqq"}}, "say --weights"),
    "an unknown kind of compressed tensors": ({**LLAMA, "quantization_config": {"quant_method": "compressed-tensors", "config_groups": 3}}, "say --weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the file or the model, and the field; never a traceback."""
    raw, words = BAD_CONFIGS[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert 1 == main(["plan", str(tmp_path)])
    err = capsys.readouterr().err
    assert words in err
    assert str(path) in err or tmp_path.name in err
    assert 1 == err.count("\n")
    assert len(err) < 600


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"model_type": NaN}', b"1" * 5000])
def test_files_that_are_no_configs(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken JSON, another encoding, depth, lengths of digits."""
    (tmp_path / "config.json").write_bytes(text)
    assert 1 == main(["plan", str(tmp_path / "config.json")])
    err = capsys.readouterr().err
    assert str(tmp_path) in err
    assert 1 == err.count("\n")


def test_a_large_file_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's weights given for its config."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(5 << 20)
    assert 1 == main(["plan", str(path)])
    assert "larger than 4 MiB" in capsys.readouterr().err


def test_long_lists_cost_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Most of a million layers named beside a thousand: gone through once."""
    raw = {**KNOWN["qwen3-30b-a3b"], "num_hidden_layers": 1024, "mlp_only_layers": [5000] * 800_000}
    (tmp_path / "config.json").write_text(json.dumps(raw, separators=(",", ":")))
    before_s = time.process_time()
    assert 1 == main(["plan", str(tmp_path)])
    assert time.process_time() - before_s < 5
    assert "does not fit" in capsys.readouterr().err


SHIPPED = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4-g128": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int4-g64": {"quant_method": "awq", "bits": 4, "group_size": 64},
    "int4-g32": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}}, "ignore": ["lm_head"]},
    "bf16": None,
}  # fmt: skip


@pytest.mark.parametrize("policy", SHIPPED)
def test_the_checkpoint_says_its_precision(policy: str) -> None:
    """quantization_config of the common methods."""
    assert policy == read_shape({**LLAMA, "quantization_config": SHIPPED[policy]}, "m", "m").as_shipped


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["quant_method", "config_groups"]), st.text(max_size=2), max_size=2),
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(KNOWN)), st.data())
def test_any_change_of_a_config_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """A few fields with any values: sizes come out, or the one kind of error."""
    raw = dict(KNOWN[name])
    for field in data.draw(
        st.lists(
            st.sampled_from([*sorted(raw), "mlp_layer_types", "indexer_types", "layer_types", "attention_bias"]),
            max_size=3,
        )
    ):
        raw[field] = data.draw(VALUES)
    try:
        shape = read_shape(raw, name, name)
    except CommandError as error:
        assert "\n" not in str(error)
    else:
        assert all(part.num_parameters >= 0 for part in parts(shape))
