"""Triton's kernels in Triton's interpreter, on CPU tensors."""

import pytest

from kernels.backend import Backend


@pytest.fixture(scope="session")
def gpu() -> Backend:
    """The backend under test."""
    return Backend.GPU


@pytest.fixture(autouse=True, scope="module")
def products_in_order(ordered_products: None) -> None:
    """Every test of this folder compares bits."""
