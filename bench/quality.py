"""What quantization costs: our engine's logits on English prose next to a float32 model of the same dequantized weights.

The float32 model is transformers', fed by `float_weights`; the text is Python's language reference. Two things round here: the kernels
(INT4 weights are exact in both), and the KV cache.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.float_weights import float_state, folder_config
from bench.prompts import english, token_ids
from bench.table import table
from kernels.backend import describe, resolve
from kernels.kv_pool import KvDtype, KvPool
from worker.model.load import LoadedModel, load_model
from worker.model.step import StepInput

WINDOW_TOKENS = 512
CHUNK_TOKENS = 128
PAGE_SIZE = 16
SKIPPED_CHARACTERS = 20_000


class QualityError(Exception):
    """The comparison can't be made."""


@dataclass(slots=True)
class Quality:
    """Sums over positions, of one KV format."""

    title: str
    num_tokens: int = 0
    loss: float = 0.0  # nats
    divergence: float = 0.0  # nats, KL(float32 || ours)
    largest_divergence: float = 0.0
    same_likeliest: int = 0

    def add(self, logits: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """logits and expected float32 [num_tokens, vocab], targets int64 [num_tokens]."""
        ours, theirs = logits.log_softmax(dim=1), expected.log_softmax(dim=1)
        divergence = (theirs.exp() * (theirs - ours)).sum(dim=1)
        self.num_tokens += len(targets)
        self.loss += float(torch.nn.functional.nll_loss(ours, targets, reduction="sum"))
        self.divergence += float(divergence.sum())
        self.largest_divergence = max(self.largest_divergence, float(divergence.max()))
        self.same_likeliest += int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self.loss / self.num_tokens)


def report(name: str, model: Path, num_tokens: int, out: Path) -> str:
    """Measure, write quality.json and quality.md into a folder, and return the table. Raises QualityError."""
    measured = measure(model, num_tokens)
    text = markdown(name, measured)
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.md").write_text(text, encoding="utf-8")
    entries = [asdict(entry) | {"perplexity": entry.perplexity} for entry in measured]
    (out / "quality.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return text


def measure(model: Path, num_tokens: int) -> list[Quality]:
    """The float32 model against itself, then our engine with each KV format."""
    windows = list(_windows(model, num_tokens))
    loaded = load_model(model, resolve("auto"))
    reference = _float_model(model)
    truth = Quality("float32 of the same dequantized weights")
    entries: dict[KvDtype, Quality] = {
        "fp16": Quality("INT4, fp16 KV"),
        "bf16": Quality("INT4, bf16 KV"),
        "fp8": Quality("INT4, FP8 (e4m3) KV"),
    }
    for window in windows:
        targets = torch.tensor(window[1:])
        expected = reference(window)[:-1]
        truth.add(expected, expected, targets)
        for kv_dtype, entry in entries.items():
            entry.add(our_logits(loaded, window, kv_dtype)[:-1], expected, targets)
    return [truth, *entries.values()]


def markdown(name: str, measured: list[Quality]) -> str:
    """The table."""
    truth = measured[0]
    rows = []
    for entry in measured:
        count = entry.num_tokens
        rows.append([
            entry.title, f"{entry.perplexity:.4f}", f"{100 * (entry.perplexity / truth.perplexity - 1):+.2f}%",
            f"{entry.divergence / count:.2e}", f"{entry.largest_divergence:.2e}", f"{100 * entry.same_likeliest / count:.2f}%",
        ])  # fmt: skip
    head = ["", "perplexity", "against float32", "mean KL, nats", "largest KL", "same likeliest token"]
    kernels = ", ".join(f"{key} {value}" for key, value in describe(resolve("auto")).items())
    return (
        f"# Quality of {name}\n\n{truth.num_tokens:,} predicted tokens of English prose (Python's language reference) in windows of "
        f"{WINDOW_TOKENS}; {kernels}.\n\n{table(head, rows)}\n"
    )


def our_logits(loaded: LoadedModel, tokens: list[int], kv_dtype: KvDtype) -> torch.Tensor:
    """Logits float32 [num_tokens, vocab] of all positions, computed in chunks over pages as the engine does."""
    num_pages = -(-len(tokens) // PAGE_SIZE)
    pool = KvPool.allocate(loaded.kv_layout(num_pages, PAGE_SIZE, kv_dtype))
    page_table = torch.arange(num_pages, dtype=torch.int32).view(1, -1)
    parts = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        positions = torch.arange(start, start + len(chunk), dtype=torch.int32)
        step = StepInput(
            token_ids=torch.tensor(chunk),
            positions=positions,
            slots=positions.long(),
            page_table=page_table,
            row_sequence=torch.zeros(len(chunk), dtype=torch.int32),
            logit_rows=torch.arange(len(chunk)),
        )
        parts.append(loaded.model.forward(step, pool).float().clone())
    return torch.cat(parts)


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


def _windows(model: Path, num_tokens: int) -> Iterator[list[int]]:
    ids = token_ids(model, english()[SKIPPED_CHARACTERS:])
    if not WINDOW_TOKENS <= num_tokens <= len(ids):
        raise QualityError(f"the number of tokens must be from {WINDOW_TOKENS} to {len(ids)}, got {num_tokens}")
    for start in range(0, num_tokens - WINDOW_TOKENS + 1, WINDOW_TOKENS):
        yield ids[start : start + WINDOW_TOKENS]
