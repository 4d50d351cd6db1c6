"""A whole model for `bench.gpu`: is it right, are its bits the same in every batch, and how far are its steps from the floor?

Steps are a worker's own: made on the CPU, logits back on the CPU, decode steps through recorded graphs.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu_cases import relative_error
from kernels.kv_pool import KvDtype, KvPool
from worker.model.load import LoadedModel
from worker.model.step import StepInput

PAGE = 16
TOLERANCE = 1e-2  # of logits; one product's is 6e-4, and errors add up over layers


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What is run: decode steps of so many streams, each after `context` tokens, and prompts of `prompt` tokens."""

    streams: tuple[int, ...] = (1, 16, 64)
    context: int = 512
    prompt: int = 2048
    num_steps: int = 20
    num_checked: int = 200  # tokens of the texts whose bits are compared
    num_exact: int = 12  # tokens of the text that the reference computes

    @property
    def most_tokens(self) -> int:
        """Of one sequence."""
        return max(self.context + self.num_steps + 2, self.prompt, self.num_checked)


@dataclass(frozen=True, slots=True)
class Part:
    """Some positions of a text, to be computed in a sequence's pages."""

    sequence: int
    text: int
    positions: range


class Passes:
    """Passes of a model over a pool of which each sequence has pages of its own, all as long."""

    def __init__(self, loaded: LoadedModel, num_sequences: int, num_tokens: int, dtype: KvDtype) -> None:
        self._model = loaded.model
        self._vocabulary = min(loaded.config.vocab_size, 1 << 15)
        self._num_pages = -(-num_tokens // PAGE)
        layout = loaded.kv_layout(num_sequences * self._num_pages, PAGE, dtype)
        self.pool = KvPool.allocate(layout, backend=loaded.backend)

    def run(self, parts: Sequence[Part], *, every_row: bool = False) -> torch.Tensor:
        """Logits of each part's last row, or of all rows, float32."""
        counts = torch.tensor([len(part.positions) for part in parts])
        positions = torch.cat([torch.tensor(part.positions, dtype=torch.int32) for part in parts])
        texts = torch.tensor([part.text for part in parts]).repeat_interleave(counts)
        width = -(-max(part.positions.stop for part in parts) // PAGE)
        first_pages = torch.tensor([part.sequence for part in parts]) * self._num_pages
        pages = first_pages.repeat_interleave(counts) + positions // PAGE
        step = StepInput(
            token_ids=(positions.long() * 7919 + texts * 613 + 11) % self._vocabulary,
            positions=positions,
            slots=pages * PAGE + positions % PAGE,
            page_table=(first_pages[:, None] + torch.arange(width)).int(),
            row_sequence=torch.arange(len(parts), dtype=torch.int32).repeat_interleave(counts),
            logit_rows=torch.arange(len(positions)) if every_row else counts.cumsum(0) - 1,
        )
        return self._model.forward(step, self.pool)

    def prepare(self, num_streams: int, step_tokens: int) -> None:
        """As a worker does at its start."""
        self._model.prepare(self.pool, num_streams, step_tokens)


def error(loaded: LoadedModel, reference: LoadedModel, sizes: ModelSizes) -> float:
    """Of a short text's logits, relative to the reference's; half of it as a prompt, the rest in decode steps."""
    right = Passes(reference, 1, sizes.num_exact, "fp16").run([Part(0, 0, range(sizes.num_exact))], every_row=True)
    ours, half = Passes(loaded, 1, sizes.num_exact, "fp16"), sizes.num_exact // 2
    found = [ours.run([Part(0, 0, range(half))], every_row=True)]
    found += [ours.run([Part(0, 0, range(at, at + 1))]) for at in range(half, sizes.num_exact)]
    return relative_error(torch.cat(found), right)


def has_same_bits(loaded: LoadedModel, sizes: ModelSizes) -> bool:
    """Whether a text's logits are the same whole as in chunks and decode steps, alone and beside one, two and many others."""
    count, others = sizes.num_checked, max(2, max(sizes.streams) - 1)
    passes = Passes(loaded, others + 2, count, "fp8")
    whole = passes.run([Part(0, 0, range(count))], every_row=True)
    start, found = 0, []
    # How many of the text's tokens, and how many other sequences with one each.
    turns = ((count // 3, 0), (1, 0), (1, 1), (1, 2), (count // 4, others), (1, others), (count, 2))
    for turn, (size, num_beside) in enumerate(turns):
        end = min(count, start + size)
        beside = [Part(2 + number, 1 + number, range(turn, turn + 1)) for number in range(num_beside)]
        logits = passes.run([*beside, Part(1, 0, range(start, end))], every_row=True)
        found.append(logits[num_beside:])
        start = end
    return torch.equal(whole, torch.cat(found))


def check(loaded: LoadedModel, reference: LoadedModel, sizes: ModelSizes) -> bool:
    """Print and return whether the model is right."""
    off, is_same = error(loaded, reference, sizes), has_same_bits(loaded, sizes)
    is_right = off <= TOLERANCE and is_same
    bits = "same bits in every batch" if is_same else "BITS DEPEND ON THE BATCH"
    print(f"{'ok  ' if is_right else 'FAIL'} whole model: error of logits {off:.1e} of at most {TOLERANCE:.0e}, {bits}")
    return is_right


def rows(loaded: LoadedModel, bandwidth: float, sizes: ModelSizes) -> list[str]:
    """Lines of a table: decode steps and a prompt, beside the time that a copy takes to move weights and KV once."""
    most = max(sizes.streams)
    passes = Passes(loaded, most, sizes.most_tokens, "fp8")
    passes.prepare(most, max(sizes.prompt, most))
    lines = []
    for count in sizes.streams:
        for sequence in range(count):
            passes.run([Part(sequence, sequence, range(sizes.context))])
        steps = range(sizes.context, sizes.context + sizes.num_steps + 2)
        times = [_seconds(passes, [Part(s, s, range(at, at + 1)) for s in range(count)]) for at in steps]
        moved = loaded.model.weight_bytes + count * sizes.context * passes.pool.layout.token_bytes
        lines.append(_row(f"decode, {count} streams at {sizes.context}", times, count, moved, bandwidth))
    times = [_seconds(passes, [Part(0, 0, range(sizes.prompt))]) for _ in range(sizes.num_steps + 2)]
    moved = loaded.model.weight_bytes + sizes.prompt * passes.pool.layout.token_bytes
    return [*lines, _row(f"prompt of {sizes.prompt}", times, sizes.prompt, moved, bandwidth)]


def _seconds(passes: Passes, parts: Sequence[Part]) -> float:
    """From a step's numbers on the CPU to its logits there."""
    started_s = time.perf_counter()
    passes.run(parts)
    return time.perf_counter() - started_s


def _row(name: str, times: list[float], num_tokens: int, num_bytes: int, bandwidth: float) -> str:
    """The median of all but the first two."""
    seconds, floor_s = statistics.median(times[2:]), num_bytes / bandwidth
    return (
        f"| {name} | {seconds * 1e3:.2f} | {num_tokens / seconds:,.0f} | {num_bytes / 1e6:.0f} | {floor_s * 1e3:.2f} "
        f"| {floor_s / seconds:.0%} |"
    )


TABLE_HEAD = "| | ms a step | tokens/s | MB moved | ms at copy bandwidth | of it |\n|---|---|---|---|---|---|"


def made_up(folder: Path) -> Path:
    """A checkpoint of random INT4 weights in shapes of 8 billion parameters, but for its number of layers: 0.7 GB."""
    from bench.synthetic_checkpoint import Shape, write_checkpoint

    write_checkpoint(folder, Shape(hidden=4096, ffn=14336, layers=4, heads=32, kv_heads=8, context=4096))
    return folder
