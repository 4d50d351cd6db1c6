"""What the latent architectures' configurations and tensors may be: variants against transformers, Kimi's folders, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.backend import Backend, resolve
from kernels.kv_pool import KvLayout
from sluicegate.command import main
from worker.model.errors import ModelError
from worker.model.load import load_model
from worker.quantize.kv_calibration import calibrated_kv_scales

Make = Callable[..., Any]
TOKENS = [258, *((37 * i + i * i) % 256 for i in range(59))]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries made straight": ("deepseek_v3", {"q_lora_rank": None, "initializer_range": 0.1}),
    "halves rotated together": ("deepseek_v3", {"rope_interleave": False}),
    "no scaling, no biases": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False},
    ),
    "no groups, nothing normalized": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "more to choose than there is": ("glm_moe_dsa", {"index_topk": 500}),
    "one indexer for all": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared"]}),
    "an indexer everywhere": ("glm_moe_dsa", {"indexer_types": None}),
    "yarn": (
        "glm_moe_dsa",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tiny_models: ModuleType, tmp_path: Path, paged_run: Make) -> None:
    """Each choice that a configuration leaves gives transformers' logits."""
    architecture, settings = VARIANTS[variant]
    model = tiny_models.make(architecture, **settings)
    folder = tiny_models.save(model, tmp_path / "model")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]

    (logits,) = paged_run(load_model(folder, resolve("cpu")), "fp16").feed(("a", TOKENS))

    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4


def as_kimi(folder: Path, **text_changes: Any) -> None:
    """Turn a deepseek_v3 folder into one of Kimi's: the text part nested, names with a prefix, an image tower beside it."""
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"} | text_changes
    outer = {"model_type": "kimi_k25", "text_config": config, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {"vision_tower.patch_embed.proj.weight": torch.zeros(3), "mm_projector.proj.0.weight": torch.zeros(2, 2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_kimi_folder_is_its_text_part(tiny_models: ModuleType, tmp_path: Path, paged_run: Make, add_tensors: Make) -> None:  # fmt: skip
    """The same bits as the text part alone; what sees images and what predicts further tokens is left out, anything else unknown isn't."""
    plain = tiny_models.save(tiny_models.make("deepseek_v3"), tmp_path / "plain")
    kimi = tiny_models.save(tiny_models.make("deepseek_v3"), tmp_path / "kimi")
    as_kimi(kimi, eos_token_id=[7, 259], num_nextn_predict_layers=2)
    add_tensors(kimi, {f"language_model.model.layers.{layer}.eh_proj.weight": torch.zeros(4, 4) for layer in (3, 4)})
    loaded = load_model(kimi, resolve("cpu"))
    (expected,), (logits,) = (paged_run(one).feed(("a", TOKENS)) for one in (load_model(plain, resolve("cpu")), loaded))

    assert torch.equal(expected, logits)
    assert "kimi_k25" == loaded.config.architecture
    assert (7, 259) == loaded.tokenizer.eos_token_ids
    add_tensors(kimi, {"model.layers.0.input_layernorm.weight": torch.zeros(72)})
    with pytest.raises(ModelError, match=r"unknown tensor 'model\.layers\.0"):
        load_model(kimi, Backend.REF)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm_moe_dsa"])
def test_a_token_takes_what_is_stored_of_it(architecture: str, tiny_models: ModuleType, tmp_path: Path) -> None:
    """One latent vector and one rotated part a layer, and an indexer's key only in the layers that have one."""
    loaded = load_model(tiny_models.save(tiny_models.make(architecture), tmp_path / "model"), Backend.REF)
    layout: KvLayout = loaded.kv_layout(10, 16, "fp8")

    assert layout.token_bytes == 3 * (44 + 12) + (2 * 24 if architecture == "glm_moe_dsa" else 0)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm_moe_dsa"])
def test_an_fp8_cache_by_calibrated_scales(architecture: str, tiny_models: ModuleType, tmp_path: Path, paged_run: Make, relative_error: Make) -> None:  # fmt: skip
    """Scales are found for latent vectors and for the indexer's keys, and leave logits near those of 16 bits."""
    loaded = load_model(
        tiny_models.save(tiny_models.make(architecture, index_topk=60, initializer_range=0.1), tmp_path / "model"),
        resolve("cpu"),
    )
    k_scale, v_scale = calibrated_kv_scales(loaded, [TOKENS[:48], TOKENS[8:56]], lambda number: None)
    assert (3, 1) == tuple(k_scale.shape) == tuple(v_scale.shape)
    assert bool((k_scale > 1e-3).all())
    assert [layer == 1 or architecture == "deepseek_v3" for layer in range(3)] == (v_scale == 1).flatten().tolist()
    run = paged_run(loaded, "fp8")
    run.pool.k_scale.copy_(k_scale)
    run.pool.v_scale.copy_(v_scale)

    (exact,), (logits,) = paged_run(loaded, "fp16").feed(("a", TOKENS)), run.feed(("a", TOKENS))

    assert 1e-4 < relative_error(logits, exact) < 0.1


def test_a_kimi_model_is_inspected(tiny_models: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `sluicegate model inspect` says of a token is what is stored of it."""
    folder = tiny_models.save(tiny_models.make("deepseek_v3"), tmp_path / "kimi")
    as_kimi(folder)
    assert 0 == main(["model", "inspect", str(folder)])
    printed = capsys.readouterr().out
    assert "5, over a latent vector of 44" in printed
    assert f"{3 * 56 * 2} bytes in bf16, {3 * 56} in fp8" in printed


def test_matrices_by_head_are_counted(tiny_models: ModuleType, tmp_path: Path) -> None:
    """The key and value matrices that one matrix is split into weigh what they take in memory."""
    sizes = []
    for v_dim in (16, 32):
        folder = tiny_models.save(tiny_models.make("deepseek_v3", v_head_dim=v_dim), tmp_path / str(v_dim))
        sizes.append(load_model(folder, Backend.REF).model.weight_bytes)

    assert sizes[1] - sizes[0] == 3 * 4 * (
        5 * 16 * 44 + 80 * 5 * 16
    )  # float32, three layers; of `o` 72 rows in whole panels


@pytest.mark.parametrize("name", ["kv_b_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "indexer.wq_b", "indexer.k_norm"])
def test_a_missing_tensor_is_named(name: str, tiny_models: ModuleType, tmp_path: Path, add_tensors: Make) -> None:
    """A part of the attention or of the indexer that isn't there stops the load."""
    folder = tiny_models.save(tiny_models.make("glm_moe_dsa"), tmp_path / "model")
    full = f"model.layers.2.self_attn.{name}.weight"
    add_tensors(folder, {}, without=[full])

    with pytest.raises(ModelError, match=full):
        load_model(folder, Backend.REF)


def test_an_indexer_that_is_not_used_is_unknown(tiny_models: ModuleType, tmp_path: Path, edit_json: Make) -> None:
    """Tensors of an indexer in a layer that shares another's choice stop the load: somebody has made a mistake."""
    folder = tiny_models.save(tiny_models.make("glm_moe_dsa"), tmp_path / "model")
    edit_json(folder / "config.json", indexer_types=["full", "shared", "shared"])

    with pytest.raises(ModelError, match=r"unknown tensor 'model\.layers\.2\.self_attn\.indexer"):
        load_model(folder, Backend.REF)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "scoring_func": ("deepseek_v3", {"scoring_func": "softmax"}),
    "topk_method": ("deepseek_v3", {"topk_method": "greedy"}),
    "moe_layer_freq": ("deepseek_v3", {"moe_layer_freq": 2}),
    "kv_lora_rank is missing": ("deepseek_v3", {"kv_lora_rank": None}),
    "kv_lora_rank 0": ("deepseek_v3", {"kv_lora_rank": 0}),
    r"kv_lora_rank \+ qk_rope_head_dim": ("deepseek_v3", {"kv_lora_rank": 45}),
    "not a multiple of 8 up to 1024": ("deepseek_v3", {"kv_lora_rank": 1100}),
    "qk_rope_head_dim 7": ("deepseek_v3", {"qk_rope_head_dim": 7}),
    "q_lora_rank -1": ("deepseek_v3", {"q_lora_rank": -1}),
    "v_head_dim must be int": ("deepseek_v3", {"v_head_dim": "28"}),
    "head_dim 264": ("deepseek_v3", {"qk_nope_head_dim": 252}),
    "num_layers": ("deepseek_v3", {"num_hidden_layers": 10**9, "first_k_dense_replace": 10**9}),
    "num_layers 1000000001": ("glm4_moe", {"num_hidden_layers": 10**9 + 1, "first_k_dense_replace": 10**9}),
    "rope_interleave": ("glm_moe_dsa", {"rope_interleave": False}),
    "indexer_rope_interleave": ("glm_moe_dsa", {"indexer_rope_interleave": False}),
    "q_lora_rank is missing": ("glm_moe_dsa", {"q_lora_rank": None}),
    "begin with full": ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}),
    "indexer_types must name": ("glm_moe_dsa", {"indexer_types": ["full", "half", "full"]}),
    "for each of 3 layers": ("glm_moe_dsa", {"indexer_types": ["full"]}),
    "mlp_layer_types": ("glm_moe_dsa", {"mlp_layer_types": ["dense", "wet", "sparse"]}),
    "layer_types must be indexed_attention": ("glm_moe_dsa", {"layer_types": ["full_attention"] * 3}),
    "index_topk 0": ("glm_moe_dsa", {"index_topk": 0}),
    "index_head_dim 8": ("glm_moe_dsa", {"index_head_dim": 8}),
    "mlp_bias": ("glm_moe_dsa", {"mlp_bias": True}),
    "mscale": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1e300, "mscale_all_dim": 1e300}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, tiny_models: ModuleType, tmp_path: Path, edit_json: Make) -> None:
    """A field that can't be, or that would change results, stops the load by its name."""
    architecture, changes = REFUSED[words]
    folder = tiny_models.save(tiny_models.make(architecture), tmp_path / "model")
    edit_json(folder / "config.json", **changes)

    with pytest.raises(ModelError, match=words) as caught:
        load_model(folder, Backend.REF)

    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 2}, (0, 1)),
        ({"index_topk_pattern": "FSF"}, (0, 2)),
        ({}, (0, 1, 2)),
    ],
    ids=str,
)
def test_ways_to_say_who_has_an_indexer(
    fields: dict[str, Any], layers: tuple[int, ...], tiny_models: ModuleType, tmp_path: Path, edit_json: Make
) -> None:
    """A step with an offset, a pattern of letters, or nothing at all: as transformers reads them."""
    kinds = ["full" if layer in layers else "shared" for layer in range(3)]
    folder = tiny_models.save(tiny_models.make("glm_moe_dsa", indexer_types=kinds), tmp_path / "model")
    edit_json(folder / "config.json", indexer_types=None, **fields)

    assert layers == load_model(folder, Backend.REF).config.latent.indexer.layers


def _in_four_bits(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Symmetric codes in groups of 32 as compressed-tensors packs them, and the matrix that they mean."""
    groups = matrix.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(dim=2) / 7.5).half()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
    words = codes.flatten(1).long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    tensors = {"weight_packed": words.sum(dim=2).to(torch.uint32).view(torch.int32), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor(matrix.shape)
    return tensors, ((codes - 8) * scale.float()[..., None]).flatten(1)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm_moe_dsa"])
def test_every_matrix_in_four_bits(architecture: str, tiny_models: ModuleType, tmp_path: Path, edit_json: Make, paged_run: Make, relative_error: Make) -> None:  # fmt: skip
    """Quantized projections, experts, indexers and the matrix that is split by heads give the logits of the weights that they mean."""
    sizes = {
        "hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "head_dim": 8,
        "num_attention_heads": 3, "num_key_value_heads": 3, "index_topk": 60, "initializer_range": 0.1,
    }  # fmt: skip
    folders = [tiny_models.save(tiny_models.make(architecture, **sizes), tmp_path / name) for name in ("four", "float")]
    packed, meant = {}, {}
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        is_kept = tensor.ndim != 2 or any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate."))
        parts, meant[name] = ({"weight": tensor}, tensor) if is_kept else _in_four_bits(tensor)
        stem = name.removesuffix(".weight")
        packed |= {name: tensor} if is_kept else {f"{stem}.{part}": numbers for part, numbers in parts.items()}
    assert any(name.endswith("kv_b_proj.weight_packed") for name in packed)
    for folder, tensors in zip(folders, (packed, meant), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    scheme = {"targets": ["Linear"], "weights": weights}
    edit_json(
        folders[0] / "config.json",
        quantization_config={
            "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        },
    )  # fmt: skip

    (four,), (exact,) = (paged_run(load_model(one, resolve("cpu")), "fp16").feed(("a", TOKENS)) for one in folders)

    assert relative_error(four, exact) < 2e-3
