"""The kinds that the command names are those that a worker can do."""

from protocol.faults import FAULT_KINDS
from worker.faults import KINDS


def test_names_agree() -> None:
    """In the same order."""
    assert list(FAULT_KINDS) == list(KINDS)
