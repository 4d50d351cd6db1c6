"""GPUs: memory as the driver tells it, and bandwidth as its maker states it."""

import math
from dataclasses import dataclass

from sluicegate.errors import CommandError

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """`memory_bytes` is all of it; `bandwidth` in bytes a second."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float


def _card(name: str, title: str, memory_mib: int, gigabytes_a_second: float) -> Card:
    return Card(name, title, memory_mib * MIB, gigabytes_a_second * 1e9)


# Memory: `memory.total` of nvidia-smi on such a card (MI300X: 192 GB by its data sheet). Bandwidth: the maker's data sheet or product page of each card.
CARDS = {
    card.name: card
    for card in (
        _card("b200", "NVIDIA B200 SXM, 180 GB", 183_359, 8000),
        _card("h200", "NVIDIA H200 SXM, 141 GB", 143_771, 4800),
        _card("h100", "NVIDIA H100 SXM, 80 GB", 81_559, 3350),
        _card("a100-80g", "NVIDIA A100 SXM, 80 GB", 81_920, 2039),
        _card("a100-40g", "NVIDIA A100 SXM, 40 GB", 40_960, 1555),
        _card("mi300x", "AMD Instinct MI300X, 192 GB", 192 * 1024, 5300),
        _card("l40s", "NVIDIA L40S, 48 GB", 46_068, 864),
        _card("l4", "NVIDIA L4, 24 GB", 23_034, 300),
        _card("a10g", "NVIDIA A10G, 24 GB", 23_028, 600),
        _card("rtx-5090", "NVIDIA GeForce RTX 5090, 32 GB", 32_607, 1792),
        _card("rtx-4090", "NVIDIA GeForce RTX 4090, 24 GB", 24_564, 1008),
        _card("rtx-3090", "NVIDIA GeForce RTX 3090, 24 GB", 24_576, 936),
    )
}


def find_card(text: str) -> Card:
    """By name, or as `GIB:GB/S` of another one. Raises CommandError."""
    if text.lower() in CARDS:
        return CARDS[text.lower()]
    memory, colon, bandwidth = text.partition(":")
    try:
        values = (float(memory), float(bandwidth)) if colon else ()
    except ValueError:
        values = ()
    if not values or not all(math.isfinite(value) and 0 < value <= 1e6 for value in values):
        raise CommandError(f"--gpu {text}: no such card ({', '.join(CARDS)}, or GIB:GB/S, as 96:1800)")
    return Card(text, f"{values[0]:g} GiB at {values[1]:g} GB/s", int(values[0] * GIB), values[1] * 1e9)
