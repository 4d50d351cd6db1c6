"""What verifying seals adds to decode attention alone: one layer after another of a pool that no cache holds, without and with a check, in turns."""

import json
import secrets
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.backend import Backend, resolve
from kernels.kv_pool import AttentionRows, KvDtype, KvLayout, KvPool
from kernels.page_seal import open_pages
from kernels.paged_attention import paged_attention
from kernels.recording import Recording
from kernels.seals import SealCheck

ROWS: tuple[tuple[KvDtype, int, int], ...] = (
    ("fp16", 1, 600), ("fp16", 1, 4000), ("fp16", 16, 256), ("fp8", 1, 600), ("fp8", 1, 4000),
)  # fmt: skip
POOL_BYTES = 200_000_000
NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, PAGE_SIZE = 3, 9, 64, 16
FEWEST_CALLS = 100


@dataclass(frozen=True, slots=True)
class SealedAttention:
    """Median time of one layer's attention, and the median of the pairwise ratios with a check to without."""

    kv_dtype: KvDtype
    num_rows: int
    num_keys: int  # of each row
    layer_us: float
    ratio: float


def measure(num_turns: int) -> list[SealedAttention]:
    """All rows."""
    backend = resolve("cpu")
    return [_measured(*row, num_turns, backend) for row in ROWS]


def _measured(kv_dtype: KvDtype, num_rows: int, num_keys: int, num_turns: int, backend: Backend) -> SealedAttention:
    num_pages = num_rows * -(-num_keys // PAGE_SIZE)
    one_layer = KvLayout(1, num_pages, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, kv_dtype)
    num_layers = max(2, POOL_BYTES // (num_pages * one_layer.page_bytes))
    layout = KvLayout(num_layers, num_pages, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, kv_dtype)
    pool = KvPool.allocate(layout, seal_secret=secrets.token_bytes(32))
    keys = torch.arange(num_pages) * 7919
    open_pages(pool, torch.arange(num_pages), keys, backend=backend)
    # Pages lie anywhere, as in a pool that has been used for long. They're as they were opened: sound, without a row.
    table = torch.randperm(num_pages, dtype=torch.int32).view(num_rows, -1)
    numbers = torch.arange(num_rows, dtype=torch.int32)
    rows = AttentionRows(table, numbers, torch.full_like(numbers, num_keys - 1))
    check = SealCheck(keys[table.long()], torch.zeros_like(numbers), torch.zeros(num_rows, dtype=torch.int64))
    q = torch.randn(num_rows, NUM_HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    num_calls = max(num_layers, FEWEST_CALLS)

    def recorded(wanted: SealCheck | None) -> Recording:
        recording = Recording()
        with recording.record():
            for call in range(num_calls):
                paged_attention(
                    q, pool, call % num_layers, rows, softmax_scale=HEAD_DIM**-0.5, seal_check=wanted, out=out, backend=backend
                )  # fmt: skip
        return recording

    sides = [recorded(None), recorded(check)]
    seconds: list[list[float]] = [[], []]
    for _ in range(num_turns):
        for side, times in zip(sides, seconds, strict=True):
            started_s = time.perf_counter()
            side.run()
            times.append(time.perf_counter() - started_s)
    assert not check.violations.any(), "nothing was wrong with these pages"
    ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
    return SealedAttention(kv_dtype, num_rows, num_keys, statistics.median(seconds[0]) / num_calls * 1e6, ratio)


def table(found: list[SealedAttention]) -> str:
    """Microseconds of a layer without a check, and what the check adds, in percent."""
    lines = ["| attention of one layer, from memory | without, us | verified |", "|---|---|---|"]
    for one in found:
        rows = "1 row" if one.num_rows == 1 else f"{one.num_rows} rows"
        name = f"{rows} at {one.num_keys:,}, {one.kv_dtype}"
        lines.append(f"| {name} | {one.layer_us:.1f} | {(one.ratio - 1) * 100:+.1f}% |")
    return "\n".join(lines)


def write(found: list[SealedAttention], folder: Path) -> None:
    """As JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sealed_attention.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    (folder / "sealed_attention.md").write_text(table(found) + "\n")
