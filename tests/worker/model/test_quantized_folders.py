"""Whole folders in each quantized format: logits as transformers computes them from the weights that the format's definition gives."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kernels.backend import Backend
from kernels.weights import DenseWeight, Fp8Weight, Int4Weight
from worker.model.errors import ModelError
from worker.model.load import load_model
from worker.model.projection import Projection

Make = Callable[..., Any]
Parts = tuple[dict[str, torch.Tensor], np.ndarray]
SINGLE = "model.safetensors"
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _codes(matrix: np.ndarray, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounded to 16 steps a group: codes [N, K], zero points and float16 scales [N, groups]."""
    groups = matrix.reshape(len(matrix), -1, GROUP)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scale = (np.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15).astype(np.float16)
    zero = np.full(scale.shape, 8) if symmetric else np.clip(np.rint(-low / scale), 1, 15).astype(int)
    codes = np.clip(np.rint(groups / scale[..., None].astype(np.float32)) + zero[..., None], 0, 15).astype(np.uint32)
    return codes.reshape(matrix.shape), zero, scale


def _meant(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> np.ndarray:
    wide = [np.repeat(numbers.astype(np.float64), GROUP, axis=1) for numbers in (zero, scale)]
    return (codes - wide[0]) * wide[1]


def _words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbouring columns in a word, int32 [X, Y / 8]."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8))).astype(np.uint32)
    words = sum(padded[:, column::8] << np.uint32(4 * place) for place, column in enumerate(order))
    return torch.from_numpy(np.ascontiguousarray(words, dtype=np.uint32).view(np.int32))


def _compressed(matrix: np.ndarray, *, symmetric: bool) -> Parts:
    codes, zero, scale = _codes(matrix, symmetric=symmetric)
    tensors = {
        "weight_packed": _words(codes),
        "weight_scale": torch.from_numpy(scale),
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zero.T).T.contiguous()
    return tensors, _meant(codes, zero, scale)


def _gptq(matrix: np.ndarray) -> Parts:
    """With act-order: columns belong to groups at random, as many to each."""
    order = np.random.default_rng(3).permutation(matrix.shape[1])
    codes, zero, scale = _codes(matrix[:, order], symmetric=False)
    meant, unsorted, groups = (
        np.empty_like(matrix, dtype=np.float64),
        np.empty_like(codes),
        np.empty(len(order), dtype=np.int32),
    )
    meant[:, order], unsorted[:, order], groups[order] = (
        _meant(codes, zero, scale),
        codes,
        np.arange(len(order)) // GROUP,
    )
    tensors = {
        "qweight": _words(unsorted).T.contiguous(), "qzeros": _words((zero - 1).T), "g_idx": torch.from_numpy(groups),
        "scales": torch.from_numpy(scale.T.copy()), "bias": torch.zeros(len(matrix)),
    }  # fmt: skip
    return tensors, meant


def _awq(matrix: np.ndarray) -> Parts:
    codes, zero, scale = _codes(matrix, symmetric=False)
    tensors = {
        "qweight": _words(codes.T, AWQ_ORDER),
        "qzeros": _words(zero.T, AWQ_ORDER),
        "scales": torch.from_numpy(scale.T.copy()),
    }
    return tensors, _meant(codes, zero, scale)


def _fp8(matrix: np.ndarray) -> Parts:
    rows, columns = -(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128)
    scale = np.random.default_rng(5).uniform(0.001, 0.002, (rows, columns)).astype(np.float32)
    wide = np.kron(scale, np.ones((128, 128)))[: matrix.shape[0], : matrix.shape[1]]
    codes = torch.from_numpy((matrix / wide).astype(np.float32)).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.from_numpy(scale)}, codes.double().numpy() * wide


def _scheme(**fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP} | fields
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Callable[[np.ndarray], Parts], dict[str, Any], type]] = {
    "compressed-tensors": (lambda m: _compressed(m, symmetric=True), _scheme(symmetric=True), Int4Weight),
    "with zero points": (lambda m: _compressed(m, symmetric=False), _scheme(symmetric=False), Int4Weight),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}, Int4Weight),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, Int4Weight),
    "fp8": (_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Fp8Weight),
}  # fmt: skip


def quantize(folder: Path, model: LlamaForCausalLM, name: str, plain: str = "no layer") -> None:
    """Replace the matrices of the layers in a folder, but for those of one layer, and those of the model by what they mean now."""
    pack, config, _ = FORMATS[name]
    tensors = load_file(folder / SINGLE)
    for full in [name for name in tensors if name.endswith("_proj.weight") and f".{plain}." not in name]:
        parts, meant = pack(tensors.pop(full).double().numpy())
        tensors |= {full.removesuffix("weight") + suffix: tensor for suffix, tensor in parts.items()}
        model.get_parameter(full).data.copy_(torch.from_numpy(meant))
    save_file(tensors, folder / SINGLE)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}), encoding="utf-8")


def test_what_a_gpu_has_no_kernel_for_is_refused_by_name(
    llama_in_transformers: Make, folder_of: Make, tiny_models: ModuleType, tmp_path: Path
) -> None:
    """An embedding with act-order, and experts in 8-bit floats, which other backends take."""
    folder = folder_of(llama_in_transformers())
    quantize(folder, llama_in_transformers(), "gptq")
    tensors, name = load_file(folder / SINGLE), "model.embed_tokens.weight"
    parts = _gptq(tensors.pop(name).double().numpy())[0]
    tensors |= {name.removesuffix("weight") + part: parts[part] for part in ("qweight", "qzeros", "g_idx", "scales")}
    save_file(tensors, folder / SINGLE)
    load_model(folder, Backend.REF)
    with pytest.raises(ModelError, match=r"embed_tokens.weight: an embedding .* is not supported on a GPU$"):
        load_model(folder, Backend.GPU)

    model = tiny_models.make("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    mixture = tiny_models.save(model, tmp_path / "mixture")
    tensors = load_file(mixture / SINGLE)
    for full in [name for name in tensors if ".experts." in name]:
        parts = _fp8(tensors.pop(full).double().numpy())[0]
        tensors |= {full.removesuffix("weight") + suffix: tensor for suffix, tensor in parts.items()}
    save_file(tensors, mixture / SINGLE)
    settings = json.loads((mixture / "config.json").read_text(encoding="utf-8"))
    (mixture / "config.json").write_text(json.dumps(settings | {"quantization_config": FORMATS["fp8"][1]}))
    load_model(mixture, Backend.REF)
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj.*experts of 8-bit floats are not supported on GPUs$"):
        load_model(mixture, Backend.GPU)


def _matrices(part: Any) -> list[Any]:
    """The matrices of layers, or of their parts."""
    if isinstance(part, Projection):
        return list(part.parts)
    parts = (
        part
        if isinstance(part, list | tuple)
        else [getattr(part, f.name) for f in fields(part)]
        if is_dataclass(part)
        else []
    )
    return [matrix for inner in parts for matrix in _matrices(inner)]


@pytest.mark.parametrize("name", FORMATS)
def test_logits(
    name: str, backend: Backend, llama_in_transformers: Make, folder_of: Make, paged_run: Make, relative_error: Make
) -> None:
    """A prompt, then token by token: every quantized matrix keeps its bits in memory, and the logits are the reference's."""
    model = llama_in_transformers()
    folder = folder_of(model)
    quantize(folder, model, name)
    tokens = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]

    loaded = load_model(folder, backend)
    run = paged_run(loaded)
    logits = torch.cat([run.feed(("a", tokens[:30]))[0], *(run.feed(("a", [token]))[0] for token in tokens[30:])])

    assert {FORMATS[name][2]} == {type(matrix) for matrix in _matrices(loaded.model._layers)}
    assert relative_error(logits, expected) < 2e-3  # keys and values are bfloat16 in both


def test_quantized_and_plain_matrices_mix(
    llama_in_transformers: Make, folder_of: Make, paged_run: Make, relative_error: Make
) -> None:
    """A checkpoint may leave whole modules as they were; a matrix of another format in a group of three is no obstacle."""
    model = llama_in_transformers()
    folder = folder_of(model)
    quantize(folder, model, "compressed-tensors", plain="k_proj")
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7, 8]])).logits[0]

    loaded = load_model(folder, Backend.REF)

    assert {Int4Weight, DenseWeight} == {type(matrix) for matrix in _matrices(loaded.model._layers)}
    assert relative_error(paged_run(loaded).feed(("a", [5, 6, 7, 8]))[0], expected) < 2e-3


@pytest.fixture
def packed_folder(llama_in_transformers: Make, folder_of: Make) -> Path:
    """An INT4 folder that loads."""
    model = llama_in_transformers()
    folder: Path = folder_of(model)
    quantize(folder, model, "with zero points")
    return folder


def _refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, Backend.REF)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


EXPERTS = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
    "moe_intermediate_size": 96,
}  # fmt: skip


def _moe_folder(tiny_models: ModuleType, folder: Path) -> Path:
    saved: Path = tiny_models.save(tiny_models.make("qwen3_moe", **EXPERTS), folder)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in load_file(saved / SINGLE)
    return saved


@pytest.mark.parametrize("name", ["compressed-tensors", "awq", "fp8"])
def test_quantized_experts(
    name: str, backend: Backend, tiny_models: ModuleType, tmp_path: Path, paged_run: Make, relative_error: Make
) -> None:
    """Experts of 4 bits or 8-bit floats give what their dequantized matrices give."""
    quantized, plain = (_moe_folder(tiny_models, tmp_path / kind) for kind in ("quantized", "plain"))
    stored, tensors = load_file(plain / SINGLE), {}
    for full in [full for full in stored if full.endswith("_proj.weight")]:
        parts, meant = FORMATS[name][0](stored[full].double().numpy())
        tensors |= {full.removesuffix("weight") + suffix: tensor for suffix, tensor in parts.items()}
        stored[full] = torch.from_numpy(meant).float()
    save_file(stored, plain / SINGLE)
    save_file(
        {full: tensor for full, tensor in stored.items() if not full.endswith("_proj.weight")} | tensors,
        quantized / SINGLE,
    )
    settings = json.loads((quantized / "config.json").read_text(encoding="utf-8")) | {
        "quantization_config": FORMATS[name][1]
    }
    (quantized / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokens = [258, *range(30, 60)]

    results = [paged_run(load_model(folder, backend)).feed(("a", tokens))[0] for folder in (quantized, plain)]

    assert relative_error(*results) < 2e-3


def _fused(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors with those of a layer's experts as two."""
    tensors = load_file(folder / SINGLE)
    for prefix in {name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        taken = {
            part: torch.stack([tensors.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([taken["gate_proj"], taken["up_proj"]], dim=1)
        tensors[f"{prefix}.down_proj"] = taken["down_proj"]
    return tensors


def test_fused_experts(tiny_models: ModuleType, tmp_path: Path, paged_run: Make) -> None:
    """All experts in one tensor have the bits that they have one by one."""
    apart, fused = (_moe_folder(tiny_models, tmp_path / kind) for kind in ("apart", "fused"))
    save_file(_fused(fused), fused / SINGLE)

    one, other = (
        paged_run(load_model(folder, Backend.REF)).feed(("a", [258, 5, 6, 7]))[0] for folder in (apart, fused)
    )

    assert torch.equal(one, other)


FUSED_FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "an expert less": ("experts.3.gate_proj.weight' is missing", lambda t: t[:3].clone()),
    "an expert more": (
        "unknown tensor 'model.layers.0.mlp.experts.4.gate_proj.weight'",
        lambda t: torch.cat([t, t[:1]]),
    ),
    "transposed": ("gate_up_proj' gives", lambda t: t.transpose(1, 2).contiguous()),
    "an odd number of rows": ("experts.0.gate_proj.weight' is missing", lambda t: t[:, 1:].clone()),
    "experts of nothing": ("experts.0.gate_proj.weight' is missing", lambda t: torch.empty(1 << 40, t.shape[1], 0)),
    "integers": ("gate_up_proj' has type", lambda t: t.int()),
    "NaN": (
        "experts.2.up_proj.weight' has values that are not finite",
        lambda t: t.index_fill(0, torch.tensor([2]), float("nan")),
    ),
}


@pytest.mark.parametrize("case", FUSED_FAULTS)
def test_bad_fused_experts(tiny_models: ModuleType, tmp_path: Path, case: str) -> None:
    """A fused tensor that doesn't fit is named, or the expert in it."""
    word, spoil = FUSED_FAULTS[case]
    folder = _moe_folder(tiny_models, tmp_path / "model")
    tensors = _fused(folder)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = spoil(tensors[name])
    if case == "NaN":
        tensors[name][2, :96] = 0
    save_file(tensors, folder / SINGLE)

    text = _refusal(folder)

    assert word in text


MODULE = "model.layers.1.mlp.up_proj"
FAULTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any]]] = {
    "packed weight missing": (f"tensor '{MODULE}.weight", lambda t: t.pop(f"{MODULE}.weight_packed")),
    "scale missing": (f"tensor '{MODULE}.weight_scale' is missing", lambda t: t.pop(f"{MODULE}.weight_scale")),
    "NaN in a scale": (f"tensor '{MODULE}.weight'", lambda t: t[f"{MODULE}.weight_scale"][3, 1:2].fill_(float("nan"))),
    "infinity in a scale": (
        f"tensor '{MODULE}.weight'",
        lambda t: t[f"{MODULE}.weight_scale"][0, 0:1].fill_(float("inf")),
    ),
    "a part of another format": (
        f"unknown tensor '{MODULE}.scales'",
        lambda t: t.update({f"{MODULE}.scales": torch.ones(3)}),
    ),
    "a plain weight beside it": (
        f"tensor '{MODULE}.weight' is there twice",
        lambda t: t.update({f"{MODULE}.weight": torch.ones(96, 64)}),
    ),
    "a scale of nothing": (
        "unknown tensor 'model.layers.7.x.weight_scale'",
        lambda t: t.update({"model.layers.7.x.weight_scale": torch.ones(1)}),
    ),
    "a bias": (f"unknown tensor '{MODULE}.bias'", lambda t: t.update({f"{MODULE}.bias": torch.ones(96)})),
    "a quantized norm": (
        "model.norm.weight",
        lambda t: t.update(
            {"model.norm.weight_packed": t.pop("model.norm.weight").int(), "model.norm.weight_scale": torch.ones(1)}
        ),
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_tensor_is_accounted_for(packed_folder: Path, case: str) -> None:
    """A missing, unknown, doubled or spoilt tensor stops the load with its name."""
    word, spoil = FAULTS[case]
    tensors = load_file(packed_folder / SINGLE)
    spoil(tensors)
    save_file(tensors, packed_folder / SINGLE)

    assert word in _refusal(packed_folder)


def test_nan_in_fp8_codes(llama_in_transformers: Make, folder_of: Make) -> None:
    """The two codes that are NaN are found, and named after their own matrix."""
    model = llama_in_transformers()
    folder = folder_of(model)
    quantize(folder, model, "fp8")
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.0.self_attn.v_proj.weight"].view(torch.uint8)[5, 6] = 0xFF
    save_file(tensors, folder / SINGLE)

    assert "tensor 'model.layers.0.self_attn.v_proj.weight' has values that are not finite" in _refusal(folder)


def test_bias_that_says_something(llama_in_transformers: Make, folder_of: Make) -> None:
    """A bias of zeros, as AutoGPTQ writes them, says nothing; any other would be lost."""
    model = llama_in_transformers()
    folder = folder_of(model)
    quantize(folder, model, "gptq")
    load_model(folder, Backend.REF)
    tensors = load_file(folder / SINGLE)
    tensors[f"{MODULE}.bias"][4] = 0.5
    save_file(tensors, folder / SINGLE)

    assert f"unknown tensor '{MODULE}.bias'" in _refusal(folder)


def test_config_that_denies_it(packed_folder: Path) -> None:
    """Packed tensors without a quantization_config."""
    settings = json.loads((packed_folder / "config.json").read_text(encoding="utf-8"))
    del settings["quantization_config"]
    (packed_folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")

    assert "which config.json does not explain" in _refusal(packed_folder)


def _kv_scales(folder: Path, **tensors: torch.Tensor) -> None:
    stored = load_file(folder / SINGLE)
    for layer in range(2):
        stored |= {
            f"model.layers.{layer}.self_attn.{name.replace('__', '.')}": value + layer
            for name, value in tensors.items()
        }
    save_file(stored, folder / SINGLE)


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn__k_scale", "attn__v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
    ],
)
def test_kv_scales(folder: Path, names: tuple[str, str]) -> None:
    """Scales of 8-bit keys and values are handed on, one for all heads or one for each; queries' scales are no concern of ours."""
    _kv_scales(
        folder,
        **{names[0]: torch.tensor([0.5, 2.0]), names[1]: torch.tensor(0.25).bfloat16(), "q_scale": torch.ones(1)},
    )

    scales = load_model(folder, Backend.REF).kv_scales

    assert scales is not None
    assert torch.equal(torch.tensor([[0.5, 2.0], [1.5, 3.0]]), scales.k)
    assert torch.equal(torch.tensor([[0.25, 0.25], [1.25, 1.25]]), scales.v)


def test_no_kv_scales(folder: Path) -> None:
    """Most checkpoints have none."""
    assert load_model(folder, Backend.REF).kv_scales is None


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-30])
def test_bad_kv_scales(folder: Path, value: float) -> None:
    """A scale that can't be one is named with its layer."""
    _kv_scales(folder, k_scale=torch.ones(1), v_scale=torch.ones(1))
    stored = load_file(folder / SINGLE)
    stored["model.layers.1.self_attn.v_scale"].fill_(value)
    save_file(stored, folder / SINGLE)

    assert "v_scale of layer 1" in _refusal(folder)


@pytest.mark.parametrize(
    "tensors",
    [{"k_scale": torch.ones(1)}, {"k_scale": torch.ones(3), "v_scale": torch.ones(1)}],
    ids=["no v", "3 of 2 heads"],
)
def test_incomplete_kv_scales(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Scales of keys alone, or of another number of heads."""
    _kv_scales(folder, **tensors)

    assert "_scale" in _refusal(folder)


def test_kv_scales_of_integers(packed_folder: Path) -> None:
    """Scales that config.json gives for integers don't fit our 8-bit floats and are left alone."""
    settings = json.loads((packed_folder / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "int"}
    (packed_folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    _kv_scales(packed_folder, k_scale=torch.ones(1), v_scale=torch.ones(1))

    assert load_model(packed_folder, Backend.REF).kv_scales is None
