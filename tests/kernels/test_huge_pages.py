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


@pytest.mark.skipif(not has_large_pages(), reason="the system gives no large pages")
def test_settling_keeps_addresses_and_contents() -> None:
    """Memory in small pages, then in large ones, the same numbers at the same place."""
    tensor = torch.arange(4 << 20, dtype=torch.int32)
    place = tensor.data_ptr()

    huge_pages.settle()

    assert place == tensor.data_ptr()
    assert torch.equal(tensor, torch.arange(4 << 20, dtype=torch.int32))
    assert huge_bytes(tensor) >= 4 * huge_pages.SIZE


def test_small_tensors_are_left_alone() -> None:
    """There is no whole large page in them."""
    tensor = torch.ones(1000)
    huge_pages.ask_for(tensor)

    assert torch.equal(tensor, torch.ones(1000))
