"""`sluicegate eval`: a model's perplexity, its distance from a reference, and facts found again in a long text, all through our engine."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.comparison import WINDOW_TOKENS, Comparison, evaluation_windows, logits_of
from bench.needle import DEPTHS, Found, needles, num_found, search
from bench.table import table
from kernels.backend import describe, resolve
from kernels.kv_pool import KvDtype
from worker.kv_scales import KvScales, choose
from worker.model.load import LoadedModel, load_model


class EvaluationError(Exception):
    """The evaluation can't be made."""


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What is measured. Tokens of the text are rounded down to whole windows."""

    model: Path
    reference: Path | None
    num_tokens: int
    kv_dtype: KvDtype = "fp16"
    kv_scales: str = "auto"
    reference_kv_dtype: KvDtype = "fp16"
    needle_tokens: int = 1024
    kernels: str = "auto"

    @property
    def num_runs(self) -> int:
        """Passes over a window or a text, for a progress bar."""
        return (self.num_tokens // WINDOW_TOKENS + (len(DEPTHS) if self.needle_tokens else 0)) * (
            2 if self.reference else 1
        )


@dataclass(slots=True)
class Subject:
    """A model with its cache, as it's measured."""

    loaded: LoadedModel
    kv_dtype: KvDtype
    scales: KvScales

    @classmethod
    def load(cls, path: Path, kv_dtype: KvDtype, kv_scales: str, kernels: str, loaded: LoadedModel | None) -> "Subject":
        """Weights are loaded once where model and reference are the same. Raises ModelError."""
        model = loaded or load_model(path, resolve(kernels))
        layout = model.kv_layout(1, 1, kv_dtype)
        return cls(model, kv_dtype, choose(kv_scales, path, model.digest, layout, model.kv_scales))

    @property
    def title(self) -> str:
        """What is special about it."""
        scales = f", scales {self.scales.origin}" if self.kv_dtype == "fp8" else ""
        return f"{self.kv_dtype} KV{scales}"

    def logits(self, tokens: list[int], first: int = 0) -> torch.Tensor:
        """float32 [num_tokens - first, vocab]."""
        return logits_of(self.loaded, tokens, self.kv_dtype, self.scales, first)


@dataclass(slots=True)
class Evaluation:
    """What came out."""

    model: str
    reference: str | None
    entries: list[Comparison]  # the model, then the reference
    needles: list[list[Found]] = field(default_factory=list)  # likewise
    needle_tokens: int = 0
    kernels: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> str:
        """All figures."""
        content = {
            "model": self.model, "reference": self.reference, "kernels": self.kernels,
            "text": "Python's language reference (PSF licence)", "window_tokens": WINDOW_TOKENS,
            "entries": [entry.figures() for entry in self.entries], "needle_tokens": self.needle_tokens,
            "needles": [[asdict(found) for found in row] for row in self.needles],
        }  # fmt: skip
        return json.dumps(content, indent=1) + "\n"

    def as_markdown(self) -> str:
        """A table for each part."""
        first, last = self.entries[0], self.entries[-1]
        head = ["", "perplexity", "against reference", "mean KL", "p99 KL", "largest KL", "same likeliest token"]
        rows = []
        for entry in self.entries:
            beside = [
                f"{100 * (entry.perplexity / last.perplexity - 1):+.2f}%", f"{entry.mean_divergence:.2e}",
                f"{entry.p99_divergence:.2e}", f"{entry.largest_divergence:.2e}", f"{100 * entry.same_share:.2f}%",
            ] if entry is not last else ["", "", "", "", ""]  # fmt: skip
            rows.append([entry.title, f"{entry.perplexity:.4f}", *beside])
        shown = ", ".join(f"{key} {value}" for key, value in self.kernels.items())
        parts = [
            (
                f"# Quality of {self.model}\n\n{first.num_tokens:,} predicted tokens of English prose (Python's language reference, PSF licence) in windows "
                f"of {WINDOW_TOKENS}; divergences in nats; {shown}."
            ),
            table(head, rows),
        ]
        if self.needles:
            parts.append(self._needle_table())
        return "\n\n".join(parts) + "\n"

    def _needle_table(self) -> str:
        head = [f"a fact in {self.needle_tokens:,} tokens, at", *(f"{depth:.0%}" for depth in DEPTHS), "found"]
        rows = [
            [
                entry.title,
                *(f"{'yes' if one.is_found else 'no'} ({one.probability:.2f})" for one in found),
                f"{num_found(found)}/{len(found)}",
            ]
            for entry, found in zip(self.entries, self.needles, strict=True)
        ]
        return table(head, rows)


def evaluation(options: EvaluationOptions, progress: Callable[[int], None]) -> Evaluation:
    """Measure; `progress` is told of each pass. Raises EvaluationError and ModelError."""
    model = Subject.load(options.model, options.kv_dtype, options.kv_scales, options.kernels, None)
    subjects = [(options.model.name, model)]
    if options.reference is not None:
        same = model.loaded if options.reference.resolve() == options.model.resolve() else None
        reference = Subject.load(options.reference, options.reference_kv_dtype, "auto", options.kernels, same)
        if reference.loaded.tokenizer.tokenizer_json != model.loaded.tokenizer.tokenizer_json:
            raise EvaluationError(
                f"{options.model} and {options.reference} have different tokenizers: their tokens can't be compared"
            )
        subjects.append((options.reference.name, reference))
    try:
        windows = evaluation_windows(model.loaded, options.num_tokens)
    except ValueError as error:
        raise EvaluationError(str(error)) from None
    longest = model.loaded.config.context_length
    if max(options.needle_tokens, WINDOW_TOKENS) > longest:
        raise EvaluationError(
            f"{options.model}: its context is {longest} tokens, {max(options.needle_tokens, WINDOW_TOKENS)} are asked for"
        )
    entries = [Comparison(f"{name}, {subject.title}") for name, subject in subjects]
    for window in windows:
        logits = [subject.logits(window)[:-1] for _, subject in subjects]
        for entry, own in zip(entries, logits, strict=True):
            entry.add(own, logits[-1], torch.tensor(window[1:]))
        progress(len(subjects))
    found: list[list[Found]] = [[] for _ in subjects] if options.needle_tokens else []
    for needle in needles(model.loaded.tokenizer, options.needle_tokens) if options.needle_tokens else ():
        for row, (_, subject) in zip(found, subjects, strict=True):
            row.append(search(needle, subject.logits))
        progress(len(subjects))
    other = options.reference.name if options.reference else None
    return Evaluation(
        options.model.name, other, entries, found, options.needle_tokens, describe(resolve(options.kernels))
    )
