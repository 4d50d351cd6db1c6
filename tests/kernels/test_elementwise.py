"""Elementwise functions of the reference: an element's bits, wherever it stands."""

import pytest
import torch

from kernels.elementwise import each

FUNCTIONS = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 5, 12, 64, 65, 130])
def test_bits_of_a_row_do_not_depend_on_the_others(name: str, width: int) -> None:
    """Odd widths, any rows of a tensor: torch alone computes the last few numbers of a tensor otherwise on some processors."""
    x = torch.randn(100, width) * 3
    together = each(FUNCTIONS[name], x)
    torch.testing.assert_close(together, FUNCTIONS[name](x.double()).float())
    for first in range(0, 100, 9):
        for end in range(first + 1, 100, 7):
            assert torch.equal(together[first:end], each(FUNCTIONS[name], x[first:end]))
