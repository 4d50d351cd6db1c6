"""What quantization costs: our engine's logits on English prose next to a float32 model of the same dequantized weights.

The float32 model is transformers', fed by `float_weights`; the text is Python's language reference. Two things round here: the kernels
(INT4 weights are exact in both; activations have 16 bits or 8), and the KV cache.
"""

import json
from pathlib import Path

import torch

from bench.comparison import WINDOW_TOKENS, Comparison, evaluation_windows, logits_of
from bench.float_weights import float_state, folder_config
from bench.table import table
from kernels.backend import describe, resolve
from kernels.kv_pool import KvDtype
from worker.model.load import load_model


class QualityError(Exception):
    """The comparison can't be made."""


def report(name: str, model: Path, num_tokens: int, out: Path) -> str:
    """Measure, write quality.json and quality.md into a folder, and return the table. Raises QualityError."""
    measured = measure(model, num_tokens)
    text = markdown(name, measured)
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.md").write_text(text, encoding="utf-8")
    entries = [entry.figures() for entry in measured]
    (out / "quality.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return text


def measure(model: Path, num_tokens: int) -> list[Comparison]:
    """The float32 model against itself, then our engine with each KV format, and with 8-bit activations."""
    loaded = load_model(model, resolve("cpu"))
    try:
        windows = evaluation_windows(loaded, num_tokens)
    except ValueError as error:
        raise QualityError(str(error)) from None
    reference = _float_model(model)
    truth = Comparison("float32 of the same dequantized weights")
    entries: dict[tuple[KvDtype, int], Comparison] = {
        ("fp16", 16): Comparison("INT4, fp16 KV"),
        ("bf16", 16): Comparison("INT4, bf16 KV"),
        ("fp8", 16): Comparison("INT4, FP8 (e4m3) KV"),
        ("fp16", 8): Comparison("INT4, fp16 KV, 8-bit activations"),
    }
    for window in windows:
        targets = torch.tensor(window[1:])
        expected = reference(window)[:-1]
        truth.add(expected, expected, targets)
        for (kv_dtype, bits), entry in entries.items():
            resolve("cpu", bits)
            entry.add(logits_of(loaded, window, kv_dtype)[:-1], expected, targets)
    resolve("cpu")
    return [truth, *entries.values()]


def markdown(name: str, measured: list[Comparison]) -> str:
    """The table."""
    truth = measured[0]
    rows = [
        [
            entry.title, f"{entry.perplexity:.4f}", f"{100 * (entry.perplexity / truth.perplexity - 1):+.2f}%",
            f"{entry.mean_divergence:.2e}", f"{entry.largest_divergence:.2e}", f"{100 * entry.same_share:.2f}%",
        ]
        for entry in measured
    ]  # fmt: skip
    head = ["", "perplexity", "against float32", "mean KL, nats", "largest KL", "same likeliest token"]
    kernels = ", ".join(f"{key} {value}" for key, value in describe(resolve("cpu")).items())
    return (
        f"# Quality of {name}\n\n{truth.num_tokens:,} predicted tokens of English prose (Python's language reference) in windows of "
        f"{WINDOW_TOKENS}; {kernels}.\n\n{table(head, rows)}\n"
    )


class _FloatModel:
    """transformers' llama in float32."""

    def __init__(self, path: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        fields = folder_config(path)
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
        for unused in ("architectures", "model_type", "torch_dtype"):
            del fields[unused]
        config = LlamaConfig(**fields)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = float_state(path)
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not part of the state
        self._model = model.train(mode=False)

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits


def _float_model(path: Path) -> _FloatModel:
    try:
        return _FloatModel(path)
    except ImportError:
        raise QualityError("quality needs transformers: pip install 'sluicegate[bench]'") from None
