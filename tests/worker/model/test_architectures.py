"""Every architecture gives transformers' logits and greedy tokens, and the same bits whole, in chunks, token by token and from cached pages."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from kernels.backend import Backend, resolve
from worker.model.architectures import architecture as architecture_of
from worker.model.errors import ModelError
from worker.model.gguf_config import gguf_config
from worker.model.gguf_header import read_header
from worker.model.hf_fields import Fields
from worker.model.load import LoadedModel, load_model

Make = Callable[..., Any]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "glm4_moe", "deepseek_v3", "glm_moe_dsa")
TOKENS = [258, *((37 * i + i * i) % 256 for i in range(74))]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(
    request: pytest.FixtureRequest, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    """A model in transformers, and its folder."""
    model = tiny_models.make(request.param)
    return model, tiny_models.save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(pair: tuple[PreTrainedModel, Path]) -> LoadedModel:
    """The model by the native kernels."""
    return load_model(pair[1], resolve("cpu"))


def _logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_logits(pair: tuple[PreTrainedModel, Path], backend: Backend, paged_run: Make, relative_error: Make) -> None:
    """Logits of a prompt longer than the windows are transformers', with every feature on and odd sizes."""
    model, folder = pair

    (logits,) = paged_run(load_model(folder, backend), "fp16").feed(("a", TOKENS))

    expected = _logits(model, TOKENS)
    # A key that rounds to its other neighbour, as one does here and there, moves logits by more than all other rounding.
    assert relative_error(logits, expected) < 2 * TOLERANCE
    assert float((logits - expected).abs().max() / expected.abs().max()) < 4 * TOLERANCE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_with_unrounded_keys(
    name: str, tiny_models: ModuleType, tmp_path: Path, paged_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pool that rounds no keys and values, no logit differs by more than a ten-thousandth of the largest."""
    model = tiny_models.make(name, "fp32")
    run = paged_run(load_model(tiny_models.save(model, tmp_path / name), Backend.REF), "fp16")
    run.pool = replace(run.pool, k=torch.zeros(run.pool.k.shape), v=torch.zeros(run.pool.v.shape))
    monkeypatch.setattr("kernels.kv_write.ref.encode", lambda values, *_: values)

    (logits,) = run.feed(("a", TOKENS))

    expected = _logits(model, TOKENS)
    assert float((logits - expected).abs().max() / expected.abs().max()) < TOLERANCE


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf(
    architecture: str,
    kind: str,
    tiny_models: ModuleType,
    tmp_path: Path,
    backend: Backend,
    paged_run: Make,
    relative_error: Make,
) -> None:
    """A GGUF file of the architecture, written with the `gguf` package's names, gives transformers' logits."""
    settings = {
        "qwen2": {"use_sliding_window": False}, "qwen3": {"attention_bias": False},
        "qwen3_moe": {"moe_intermediate_size": 32, "mlp_only_layers": []}, "gemma3": {"query_pre_attn_scalar": 32},
    }[architecture]  # fmt: skip
    model = tiny_models.make(
        architecture,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    path = tiny_models.save_gguf(model, architecture, tmp_path / "model.gguf", kind)

    (logits,) = paged_run(load_model(path, backend), "fp16").feed(("a", TOKENS))

    assert relative_error(logits, _logits(model, TOKENS)) < (3 * TOLERANCE if kind == "F32" else 6e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gemma3.final_logit_softcapping", 30.0), ("gemma3.attn_logit_softcapping", 50.0), ("gemma3.rope.dimension_count", 16),
        ("gemma3.attention.value_length", 16), ("gemma3.attention.sliding_window", 0), ("gemma3.rope.scaling.type", "yarn"),
        ("gemma3.rope.freq_base_swa", 0.0), ("gemma3.attention.sliding_window_pattern", 0),
    ],
)  # fmt: skip
def test_refused_of_a_gguf(key: str, value: float | str, tiny_models: ModuleType, tmp_path: Path) -> None:
    """Metadata that change results, and aren't supported, stop the load."""
    path = tiny_models.save_gguf(tiny_models.make("gemma3"), "gemma3", tmp_path / "model.gguf", **{key: value})

    with pytest.raises(ModelError, match=r"model\.gguf: .*(softcapping|dimension|windows|yarn|pattern)"):
        load_model(path, Backend.REF)


def test_pattern_of_windows_of_a_gguf(tiny_models: ModuleType, tmp_path: Path) -> None:
    """Every so manieth layer has no window: as many as the file says."""
    model = tiny_models.make("gemma3")
    key = "gemma3.attention.sliding_window_pattern"
    path = tiny_models.save_gguf(model, "gemma3", tmp_path / "model.gguf", **{key: 2})

    windows = gguf_config(read_header(path)).windows

    assert [window is None for window in windows] == [layer % 2 == 1 for layer in range(len(windows))]
    assert None in windows


@pytest.mark.parametrize(
    ("key", "value"), [("expert_gating_func", 2), ("expert_weights_scale", 2.5), ("rope.scaling.attn_factor", 0.5)]
)
def test_mixtures_of_a_gguf_that_choose_in_another_way(
    key: str, value: float, tiny_models: ModuleType, tmp_path: Path
) -> None:
    """Sigmoids in place of a softmax, or scaled results of experts, stop the load."""
    model = tiny_models.make("qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])
    path = tiny_models.save_gguf(model, "qwen3_moe", tmp_path / "model.gguf", **{f"qwen3moe.{key}": value})

    with pytest.raises(ModelError, match=rf"model\.gguf: .*{key}"):
        load_model(path, Backend.REF)


def test_older_names_of_gemmas_bases(tiny_models: ModuleType, tmp_path: Path, edit_json: Make, paged_run: Make) -> None:
    """Bases, scaling and the pattern of windows under the names that the first files had give the same bits."""
    folder = tiny_models.save(tiny_models.make("gemma3"), tmp_path / "model")
    (expected,) = paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))
    edit_json(
        folder / "config.json", rope_parameters=None, layer_types=None, rope_theta=50000.0, rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window_pattern=6, tie_word_embeddings=None,
    )  # fmt: skip

    assert torch.equal(expected, paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))[0])


def test_the_text_part_of_a_gemma_that_sees_pictures(
    tiny_models: ModuleType, tmp_path: Path, add_tensors: Make, paged_run: Make
) -> None:
    """Nested in text_config, with prefixed names beside a picture tower's tensors, the model gives the same bits."""
    folder = tiny_models.save(
        tiny_models.make("gemma3", num_attention_heads=8, num_key_value_heads=4), tmp_path / "model"
    )
    (expected,) = paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))
    text = json.loads((folder / "config.json").read_text())
    for usual in ("num_attention_heads", "num_key_value_heads"):
        del text[usual]
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    own = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in own.items()}
    add_tensors(folder, renamed | {"vision_tower.x": torch.zeros(2)}, without=list(own))

    assert torch.equal(expected, paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))[0])


def test_greedy(pair: tuple[PreTrainedModel, Path], loaded: LoadedModel, paged_run: Make) -> None:
    """64 greedy tokens are those of transformers: each is its choice after all before it."""
    run, tokens = paged_run(loaded, "fp16"), TOKENS[:9]
    (logits,) = run.feed(("a", tokens))
    for _ in range(64):
        tokens = [*tokens, int(logits[-1].argmax())]
        (logits,) = run.feed(("a", tokens[-1:]))

    assert tokens[9:] == _logits(pair[0], tokens)[8:-1].argmax(dim=1).tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("sizes", [[1] * 75, [16, 59], [33, 1, 1, 40]], ids=["token by token", "a page", "odd chunks"])
def test_chunks(loaded: LoadedModel, paged_run: Make, sizes: list[int], dtype: str) -> None:
    """However a prompt is cut, its logits have the same bits; so they do beside others."""
    (whole,) = paged_run(loaded, dtype).feed(("a", TOKENS))
    run, ends = paged_run(loaded, dtype), torch.tensor(sizes).cumsum(0).tolist()
    pieces = [TOKENS[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    parts = [run.feed(("b", [7 + i]), ("a", piece))[1] for i, piece in enumerate(pieces)]

    assert torch.equal(whole, torch.cat(parts))


def test_warm(loaded: LoadedModel, paged_run: Make) -> None:
    """What follows cached pages has the bits that it has after computing them."""
    run = paged_run(loaded, "fp8")
    (whole,) = run.feed(("a", TOKENS))
    run.share("a", "b", 3)

    (rest,) = run.feed(("b", TOKENS[48:]))

    assert torch.equal(whole[48:], rest)


def test_native_gives_what_the_reference_gives(pair: tuple[PreTrainedModel, Path], loaded: LoadedModel, paged_run: Make, relative_error: Make) -> None:  # fmt: skip
    """Stored in 16-bit floats, the two backends differ by rounding alone."""
    (ours,) = paged_run(loaded, "fp16").feed(("a", TOKENS))
    (reference,) = paged_run(load_model(pair[1], Backend.REF), "fp16").feed(("a", TOKENS))

    assert relative_error(ours, reference) < 2 * TOLERANCE


def test_experts_are_counted(tiny_models: ModuleType, tmp_path: Path) -> None:
    """All experts' bytes are in the model's weight."""
    sizes = []
    for count in (4, 8):
        model = tiny_models.make("qwen3_moe", num_experts=count, num_experts_per_tok=2)
        sizes.append(load_model(tiny_models.save(model, tmp_path / str(count)), Backend.REF).model.weight_bytes)
    rows = (-(-2 * 40 // 16) + 0) * 16 * 72 + -(-72 // 16) * 16 * 40  # of one expert, in whole panels
    routers = -(-8 // 16) - -(-4 // 16)

    assert sizes[1] - sizes[0] == 4 * 2 * 4 * rows + routers  # float32, two layers, four experts more


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "attn_logit_softcapping": ("gemma3", {"attn_logit_softcapping": 50.0}),
    "final_logit_softcapping": ("gemma3", {"final_logit_softcapping": 30.0}),
    "use_bidirectional_attention": ("gemma3", {"use_bidirectional_attention": True}),
    "hidden_activation": ("gemma3", {"hidden_activation": "silu"}),
    "layer_types": ("gemma3", {"layer_types": ["full_attention"]}),
    "sliding_window": ("gemma3", {"sliding_window": "all"}),
    "windows": ("gemma3", {"sliding_window": 0}),
    "query_pre_attn_scalar": ("gemma3", {"query_pre_attn_scalar": 0}),
    "hidden_act": ("qwen3", {"hidden_act": "gelu"}),
    "use_sliding_window": ("qwen3_moe", {"use_sliding_window": True}),
    "embedding_multiplier": ("llama", {"embedding_multiplier": 12.0}),
    "rope scaling": ("qwen2", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}),
    "beta_fast": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}}),
    "partial_rotary_factor": ("qwen2", {"partial_rotary_factor": 0.5}),
    "number of experts": ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}),
    "chosen experts": ("qwen3_moe", {"num_experts_per_tok": 7}),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": ["0"]}),
    "decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 0}),
    "size of experts": ("qwen3_moe", {"moe_intermediate_size": -1}),
    "groups": ("glm4_moe", {"n_group": 4}),
    "rotated dimensions": ("glm4_moe", {"partial_rotary_factor": 0.0, "rope_parameters": None}),
    "factor of experts": ("glm4_moe", {"routed_scaling_factor": float("nan")}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, tiny_models: ModuleType, tmp_path: Path, edit_json: Make) -> None:
    """A field that changes results, and isn't supported, stops the load by its name."""
    architecture, changes = REFUSED[words]
    folder = tiny_models.save(tiny_models.make(architecture), tmp_path / "model")
    edit_json(folder / "config.json", **changes)

    with pytest.raises(ModelError, match=words) as caught:
        load_model(folder, Backend.REF)

    assert str(folder) in str(caught.value)


def test_layers_that_predict_further_tokens_are_ignored(tiny_models: ModuleType, tmp_path: Path, add_tensors: Make, paged_run: Make) -> None:  # fmt: skip
    """Tensors of a layer past the last change nothing; another unknown tensor stops the load."""
    folder = tiny_models.save(tiny_models.make("glm4_moe"), tmp_path / "model")
    (expected,) = paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))
    add_tensors(folder, {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)})

    assert torch.equal(expected, paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))[0])

    add_tensors(folder, {"model.layers.2.eh_proj.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match=r"model\.layers\.2\.eh_proj"):
        load_model(folder, Backend.REF)


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3", "glm_moe_dsa"])
def test_as_many_of_them_as_are_said(
    architecture: str, tiny_models: ModuleType, tmp_path: Path, add_tensors: Make, edit_json: Make, paged_run: Make
) -> None:
    """Two layers past the last where config.json says two; a third one is unknown, and so is the second where it says one or nothing."""
    folder = tiny_models.save(tiny_models.make(architecture), tmp_path / "model")
    (expected,) = paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))
    add_tensors(folder, {f"model.layers.{layer}.mlp.gate.weight": torch.zeros(4, 4) for layer in (3, 4)})
    edit_json(folder / "config.json", num_nextn_predict_layers=2)

    assert torch.equal(expected, paged_run(load_model(folder, Backend.REF)).feed(("a", TOKENS))[0])

    add_tensors(folder, {"model.layers.5.mlp.gate.weight": torch.zeros(4, 4)})
    for said, unknown in ((2, 5), (1, 4), (0, 4), (None, 4)):
        edit_json(folder / "config.json", num_nextn_predict_layers=said)
        with pytest.raises(ModelError, match=rf"unknown tensor 'model\.layers\.{unknown}\.mlp"):
            load_model(folder, Backend.REF)
    for said in (-1, 65):
        edit_json(folder / "config.json", num_nextn_predict_layers=said)
        with pytest.raises(ModelError, match=f"num_nextn_predict_layers {said} is out of range"):
            load_model(folder, Backend.REF)


@pytest.mark.parametrize(
    "name", ["mlp.experts.3.up_proj", "mlp.gate", "mlp.shared_experts.down_proj", "self_attn.q_norm"]
)
def test_a_missing_tensor_is_named(name: str, tiny_models: ModuleType, tmp_path: Path, add_tensors: Make) -> None:
    """An expert, router, shared expert or norm that isn't there stops the load."""
    folder = tiny_models.save(tiny_models.make("glm4_moe"), tmp_path / "model")
    full = f"model.layers.1.{name}.weight"
    add_tensors(folder, {}, without=[full])

    with pytest.raises(ModelError, match=full):
        load_model(folder, Backend.REF)


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [("glm4_moe", "Glm4MoeConfig"), ("deepseek_v3", "DeepseekV3Config"), ("glm_moe_dsa", "GlmMoeDsaConfig")],
)
def test_fields_that_are_left_out(architecture: str, config_class: str, tiny_models: ModuleType) -> None:
    """What config.json doesn't say is what transformers takes for it."""
    usual, raw = getattr(transformers, config_class)(), tiny_models.make(architecture).config.to_dict()
    for name in ("rms_norm_eps", "n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "norm_topk_prob", "first_k_dense_replace"):  # fmt: skip
        raw.pop(name)
    raw |= {"num_hidden_layers": 5, "mlp_layer_types": None, "indexer_types": None, "layer_types": None}
    config = architecture_of(architecture, "config.json").read_config(Fields(raw, "config.json"))

    assert config.experts is not None
    assert usual.rms_norm_eps == config.rms_eps
    assert (usual.n_group, usual.topk_group) == (config.experts.num_groups, config.experts.top_groups)
    assert (usual.routed_scaling_factor, usual.norm_topk_prob) == (config.experts.scale, config.experts.normalize)
    assert usual.n_shared_experts * config.experts.size == config.experts.shared_size
    assert frozenset(range(usual.first_k_dense_replace)) == config.experts.dense_layers
