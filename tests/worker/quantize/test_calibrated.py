"""The float layers compute what transformers computes, and calibration pays."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from bench.comparison import Comparison, evaluation_windows, logits_of
from kernels.backend import resolve
from worker.model.architectures import folder_config
from worker.model.load import load_model
from worker.quantize.float_layers import FloatLayers
from worker.quantize.job import Options, prepare
from worker.quantize.plan import layer_of
from worker.quantize.source import FolderSource
from worker.quantize.texts import calibration_text, evaluation_text
from worker.quantize.windows import calibration_windows

Make = Callable[..., Path]


_SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.15,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**_SIZES), "llama with biases": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**{name: size for name, size in _SIZES.items() if name != "head_dim"}), "qwen3": Qwen3Config(**_SIZES),
    "gemma3": Gemma3TextConfig(**_SIZES, sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_as_in_transformers(name: str) -> None:
    """Each layer's output, in float32."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(MODELS[name]).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.uniform_(-0.5, 1.0)
    found, config = folder_config(MODELS[name].to_dict(), "x")
    layers = FloatLayers.make(config, found.names, 96)
    parameters = dict(model.named_parameters())
    tokens = torch.arange(96) * 37 % 384
    with torch.no_grad():
        expected = model(tokens[None], output_hidden_states=True).hidden_states
        hidden = model.model.embed_tokens.weight[tokens] * config.embedding_factor
        for layer in range(config.num_layers):
            weights = {
                role: parameters[n]
                for role, name in found.names.items()
                if "{layer}" in name and (n := name.format(layer=layer)) in parameters
            }
            hidden = layers(hidden, layer, weights)
            if layer + 1 < config.num_layers:  # the last one comes normalized
                assert torch.allclose(hidden, expected[layer + 1][0], rtol=1e-3, atol=1e-3 * float(hidden.abs().max()))
        assert torch.allclose(model.model.norm(hidden), expected[-1][0], rtol=1e-3, atol=1e-3)


def test_gptq_is_closer_than_rounding(make_folder: Make, tmp_path: Path) -> None:
    """Logits in transformers, which decompresses the folders, over text that was not calibrated with."""
    source = make_folder(dtype=torch.float32, initializer_range=0.05)
    prepare(source, Options()).run(tmp_path / "rtn", lambda more: None)
    prepare(source, Options(method="gptq", calibration_tokens=8192)).run(tmp_path / "gptq", lambda more: None)
    windows = calibration_windows(FolderSource(source).tokenizer(), 16384)[-4:]
    outputs = []
    for folder in (source, tmp_path / "rtn", tmp_path / "gptq"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            outputs.append(model(windows).logits)
    rtn, gptq = (float((output - outputs[0]).square().mean()) for output in outputs[1:])
    assert 0 < gptq < 0.8 * rtn


@pytest.fixture(scope="module")
def smollm2_start(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of SmolLM2 with its embedding, last norm and head, as a folder in 16 bits."""
    folder = tmp_path_factory.mktemp("smollm2") / "start"
    num_layers = 4
    prepare(smollm2_path, Options(policy="none")).run(folder, lambda more: None)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if (layer_of(name) or 0) < num_layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return folder


def test_gptq_is_closer_than_rounding_on_real_weights(smollm2_start: Path, tmp_path: Path) -> None:
    """Next-token distributions through our engine, over the evaluation text."""
    options = {"rtn": Options(), "gptq": Options(method="gptq", calibration_tokens=2048)}
    reference = load_model(smollm2_start, resolve("cpu"))
    windows = evaluation_windows(reference, 1024)
    expected = [logits_of(reference, window, "fp16") for window in windows]
    divergence = {}
    for name, chosen in options.items():
        prepare(smollm2_start, chosen).run(tmp_path / name, lambda more: None)
        loaded, comparison = load_model(tmp_path / name, resolve("cpu")), Comparison(name)
        for window, theirs in zip(windows, expected, strict=True):
            comparison.add(logits_of(loaded, window, "fp16")[:-1], theirs[:-1], torch.tensor(window[1:]))
        divergence[name] = comparison.mean_divergence
    assert 0 < divergence["gptq"] < 0.5 * divergence["rtn"]


def test_the_two_texts_have_no_passage_in_common() -> None:
    """No twelve words in a row; both are long enough."""

    def passages(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[i : i + 12]) for i in range(len(words) - 11)}

    shared = passages(calibration_text()) & passages(evaluation_text())
    # Passages that begin in one docstring and end in the next stand in no text.
    assert not shared
    assert len(calibration_text()) > 300_000 < len(evaluation_text())
    assert pytest.approx(len(calibration_text()), rel=0.5) == 500_000
