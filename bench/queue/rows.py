"""What a measurement found, beside what it should have."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `is_met` is None where nothing was promised or the build can't show it."""

    name: str
    value: str
    goal: str
    is_met: bool | None
    details: dict[str, Any] = field(default_factory=dict)


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the sorted values lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
