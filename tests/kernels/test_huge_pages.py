"""Large pages change where memory lies, never what is in it."""

import sys
from pathlib import Path

import pytest
import torch

from kernels import huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes of large pages in the mapping that holds a tensor's first large page."""
    place = -(-tensor.data_ptr() // huge_pages.SIZE) * huge_pages.SIZE
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            first, end = (int(part, 16) for part in fields[0].split("-"))
            is_inside = first <= place < end
        elif is_inside and fields[0] == "AnonHugePages:":
            return int(fields[1]) << 10
    return 0


def has_large_pages() -> bool:
    """Whether this system gives them to who asks."""
    return sys.platform == "linux" and ENABLED.exists() and "[never]" not in ENABLED.read_text()


@pytest.mark.skipif(not has_large_pages(), reason="the system gives no large pages")
def test_memory_that_is_asked_for_comes_in_large_pages() -> None:
    """Memory that nobody has touched: more than the allocator has in store."""
    tensor = torch.empty(256 << 20, dtype=torch.uint8)
    huge_pages.ask_for(tensor)
    tensor.fill_(1)

    assert huge_bytes(tensor) > 0
    assert tensor.sum(dtype=torch.int64) == len(tensor)


def test_pieces_of_weight_memory_do_not_overlap() -> None:
    """Small and large ones, more than a chunk in all, each of its shape and type, and keeping what was written to it."""
    memory = huge_pages.WeightMemory()
    sizes = [(3, 5), (1 << 20,), (40 << 20,), (7,), (0, 4), (30 << 20,), (100, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float32, torch.uint8, torch.float16]
    pieces = [
        memory.empty(size, dtype).fill_(number)
        for number, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True), 1)
    ]

    for number, (piece, size, dtype) in enumerate(zip(pieces, sizes, dtypes, strict=True), 1):
        assert (size, dtype) == (tuple(piece.shape), piece.dtype)
        assert bool((piece == number).all())
        assert piece.data_ptr() % 64 == 0 or not piece.numel()


@pytest.mark.skipif(not has_large_pages(), reason="the system gives no large pages")
def test_weight_memory_lies_on_large_pages() -> None:
    """Pieces that are smaller than a page share one."""
    memory = huge_pages.WeightMemory()
    pieces = [memory.empty((1 << 19,), torch.uint8).fill_(1) for _ in range(16)]

    assert huge_bytes(pieces[0]) >= 2 * huge_pages.SIZE
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == 1 << 19


def test_small_tensors_are_left_alone() -> None:
    """There is no whole large page in them."""
    tensor = torch.ones(1000)
    huge_pages.ask_for(tensor)

    assert torch.equal(tensor, torch.ones(1000))
