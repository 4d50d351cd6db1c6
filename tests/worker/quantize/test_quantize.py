"""Whole folders: what comes out is read by the compressed-tensors library, by transformers and by our worker; kills cost nothing but time."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_name
from safetensors.torch import load_file, save_file

from bench.comparison import logits_of
from kernels.backend import resolve
from worker.model.load import load_model
from worker.quantize.errors import QuantizeError
from worker.quantize.job import Options, prepare
from worker.quantize.manifest import MANIFEST, only_writer
from worker.quantize.packing import unpacked_parts
from worker.quantize.rounding import Precision

Make = Callable[..., Path]
PLAIN = Options()
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
CASES = {
    "g32": Options(), "g64 with minimum": Options(group_size=64, is_symmetric=False), "g128": Options(group_size=128),
    "gptq": Options(method="gptq", calibration_tokens=1024, shard_bytes=100_000),
    "gptq with minimum": Options(method="gptq", is_symmetric=False, calibration_tokens=512),
    "8 bits": Options(overrides=(("*layers*", 8), ("*lm_head", 8), ("*embed_tokens", 8))),
}  # fmt: skip


def _run(source: Path, result: Path, options: Options) -> None:
    prepare(source, options).run(result, lambda more: None)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_the_library_reads_it_bit_by_bit(case: str, dtype: torch.dtype, make_folder: Make, tmp_path: Path) -> None:
    """Decompressed by the library, each matrix is our own dequantization, rounded to the scales' type as the library does; the rest is untouched."""
    source, result = make_folder(dtype=dtype), tmp_path / "result"
    _run(source, result, CASES[case])
    before, after = _tensors(source), _tensors(result)
    config = QuantizationConfig.model_validate(json.loads((result / "config.json").read_text())["quantization_config"])
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    quantized = [name.removesuffix(".weight_packed") for name in after if name.endswith(".weight_packed")]

    assert len(quantized) >= 21
    for module in quantized:
        parts = {
            name.removeprefix(f"{module}."): tensor
            for name, tensor in after.items()
            if name.startswith(f"{module}.weight_")
        }
        (scheme,) = (
            s for s in config.config_groups.values() if any(match_name(module, target) for target in s.targets)
        )
        precision = Precision(scheme.weights.num_bits, scheme.weights.group_size, scheme.weights.symmetric)
        theirs = compressor.decompress(dict(parts), scheme)["weight"]
        ours = unpacked_parts(parts, precision).dequantize()
        assert torch.equal(theirs, ours.to(theirs.dtype))
        weight = before[f"{module}.weight"].float()
        bound = 2e-4 if precision.bits == 8 else 0.3 if CASES[case].method == "gptq" else 0.05  # gptq aims at products
        assert float((ours - weight).square().mean()) < bound * float(weight.square().mean())
    kept = {name for name in before if name.removesuffix(".weight") not in quantized}
    assert kept == {name for name in after if ".weight_" not in name}
    assert all(torch.equal(before[name], after[name]) for name in kept)


def test_all_that_is_needed_goes_along(make_folder: Make, tmp_path: Path) -> None:
    """Tokenizer and configuration; the manifest has the digest of each file read and written."""
    source, result = make_folder(), tmp_path / "result"
    _run(source, result, Options())
    manifest = json.loads((result / MANIFEST).read_text())
    read, written = _digests(source), _digests(result)

    assert {name: read[name] for name in read if name.endswith(".safetensors") or name == "config.json"} == manifest[
        "source"
    ]
    assert {name: digest for name, digest in written.items() if name != MANIFEST} == manifest["result"]
    assert manifest["is_complete"]
    assert read["tokenizer.json"] == written["tokenizer.json"]
    index = json.loads((result / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(_tensors(result))
    _run(source, result, Options())  # once more: nothing to do
    assert written == _digests(result)


_KILLED = """
import os, signal, sys
from pathlib import Path
from worker.quantize.job import Options, prepare
left = int(sys.argv[3])
def progress(more):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
prepare(Path(sys.argv[1]), eval(sys.argv[4])).run(Path(sys.argv[2]), progress)
"""


@pytest.mark.parametrize("case", ["g64 with minimum", "gptq"])
def test_killed_and_resumed(case: str, make_folder: Make, tmp_path: Path) -> None:
    """kill -9 at several places, one after another; the bytes are those of a run that nothing happened to."""
    source = make_folder()
    _run(source, tmp_path / "whole", CASES[case])
    killed = tmp_path / "killed"
    for after in (9, 14):
        command = [sys.executable, "-c", _KILLED, str(source), str(killed), str(after), repr(CASES[case])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)
        assert -9 == done.returncode, done.stderr
        assert not (killed / "config.json").exists()
        assert not json.loads((killed / MANIFEST).read_text())["is_complete"]
    finished = json.loads((killed / MANIFEST).read_text())["result"]
    assert 0 < len(finished) < len(_digests(tmp_path / "whole"))
    _run(source, killed, CASES[case])
    assert _digests(tmp_path / "whole") == _digests(killed)


def test_a_damaged_file_is_made_again(make_folder: Make, tmp_path: Path) -> None:
    """Finished files are known by their bytes, not by their names."""
    source, result = make_folder(), tmp_path / "result"
    _run(source, result, CASES["gptq"])
    before = _digests(result)
    shard = sorted(result.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    (result / "half.safetensors.part").write_bytes(b"x")
    _run(source, result, CASES["gptq"])
    assert before == _digests(result)


def test_what_is_refused(make_folder: Make, tmp_path: Path) -> None:
    """One line that names it; nothing is overwritten."""
    source, result = make_folder(), tmp_path / "result"
    _run(source, result, Options())
    for options, named in (
        (Options(group_size=64), "begun with group_size 32, not 64"),
        (Options(is_symmetric=False), "begun with symmetric true, not false"),
        (Options(method="gptq"), "begun with calibration_text null"),
        (Options(overrides=(("*", 8),)), "begun with overrides"),
    ):
        with pytest.raises(QuantizeError, match=named):
            _run(source, result, options)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "diary.txt").write_text("mine")
    for folder, named in (
        (foreign, "'diary.txt' and was not made by this command"), (source, "lies in the source"), (source / "x", "lies in the source"),
        (tmp_path / "no" / "such", "no such folder"), (source / "config.json", "lies in the source"),
    ):  # fmt: skip
        with pytest.raises(QuantizeError, match=named):
            _run(source, folder, Options())
    assert ["diary.txt"] == [path.name for path in foreign.iterdir()]


def test_one_process_at_a_time(make_folder: Make, tmp_path: Path) -> None:
    """While one writes a folder, another is told so."""
    source, result = make_folder(), tmp_path / "result"
    with only_writer(result), pytest.raises(QuantizeError, match="another process is writing it"):
        _run(source, result, Options())
    _run(source, result, Options())


def test_another_source_is_not_mixed_in(make_folder: Make, tmp_path: Path) -> None:
    """A run that began from other weights doesn't go on with these."""
    source, result = make_folder(), tmp_path / "result"
    _run(source, result, Options())
    file = sorted(source.glob("*.safetensors"))[0]
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(QuantizeError, match=f"begun from another {file.name}"):
        _run(source, result, Options())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_values_that_are_not_finite(name: str, value: float, make_folder: Make, tmp_path: Path) -> None:
    """The tensor is named, and the folder is no model."""
    source, result = make_folder(max_shard_size="1GB"), tmp_path / "result"
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[7] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(QuantizeError, match=f"tensor '{name}' has values that are not finite"):
        _run(source, result, Options())
    assert not (result / "config.json").exists()


def test_sources_that_cannot_be_read(make_folder: Make, tmp_path: Path) -> None:
    """A missing shard, a file that was cut, one outside the folder, weights that are quantized already, an unknown family for gptq."""
    source = make_folder()
    shard = sorted(source.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    config = json.loads((source / "config.json").read_text())

    def refused(named: str, options: Options = PLAIN) -> None:
        with pytest.raises(QuantizeError, match=named):
            _run(source, tmp_path / "result", options)

    shard.unlink()
    refused(f"{shard.name}: no such file")
    shard.write_bytes(content[:-10])
    refused(f"{shard.name}: cannot be read")
    shard.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    shard.symlink_to(tmp_path / "elsewhere")
    refused("lies outside the model folder")
    shard.unlink()
    shard.write_bytes(content)
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    refused("is quantized already")
    (source / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    refused("method gptq knows llama, qwen2", Options(method="gptq"))
    assert not (tmp_path / "result").exists()


def test_fp8_in_blocks(make_folder: Make, tmp_path: Path) -> None:
    """FP8 with scales of 128 x 128 is what its values are: the same codes as of those values in bf16."""
    source = make_folder(max_shard_size="1GB", intermediate_size=288)
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    scaled, plain = {}, {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            scaled[name] = plain[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        scaled[name] = (tensor.float() / wide).to(torch.float8_e4m3fn)
        scaled[name + "_scale_inv"] = scale
        plain[name] = (scaled[name].float() * wide).bfloat16()
    save_file(plain, source / "model.safetensors")
    _run(source, tmp_path / "plain", Options())
    save_file(scaled, source / "model.safetensors")
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    _run(source, tmp_path / "fp8", Options())
    expected, found = _tensors(tmp_path / "plain"), _tensors(tmp_path / "fp8")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    del scaled["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(scaled, source / "model.safetensors")
    with pytest.raises(QuantizeError, match=r"'model.layers.0.mlp.up_proj.weight' is FP8, but has no scales"):
        prepare(source, Options())


@pytest.mark.parametrize("case", ["g32", "g64 with minimum", "gptq", "8 bits"])
def test_our_worker_reads_it(case: str, make_folder: Make, tmp_path: Path) -> None:
    """Logits are those of a folder with the dequantized weights in float32."""
    source, result, dense = make_folder(), tmp_path / "result", tmp_path / "dense"
    _run(source, result, CASES[case])
    shutil.copytree(source, dense)
    for file in dense.glob("*.safetensors"):
        file.unlink()
    (dense / "model.safetensors.index.json").unlink()
    config = QuantizationConfig.model_validate(json.loads((result / "config.json").read_text())["quantization_config"])
    tensors = _tensors(result)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        (weights,) = (
            s.weights for s in config.config_groups.values() if any(match_name(module, target) for target in s.targets)
        )
        precision = Precision(weights.num_bits, weights.group_size, weights.symmetric)
        parts = {
            n.removeprefix(f"{module}."): tensors.pop(n) for n in list(tensors) if n.startswith(f"{module}.weight_")
        }
        tensors[f"{module}.weight"] = unpacked_parts(parts, precision).dequantize()
    save_file(tensors, dense / "model.safetensors")
    tokens = list(range(2, 130))
    ours, expected = (logits_of(load_model(folder, resolve("cpu")), tokens, "fp16") for folder in (result, dense))
    assert float((ours - expected).square().mean()) < 1e-5 * float(expected.square().mean())
