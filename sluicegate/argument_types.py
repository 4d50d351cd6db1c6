"""Types of arguments: each turns text into a checked value, or says in one line what it expected."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number in [low, high]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low} to {high}, got {value}")
        return value

    return parse


def seconds(text: str) -> float:
    """A time of up to a day."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not (math.isfinite(value) and 0 <= value <= 86_400):
        raise argparse.ArgumentTypeError(f"must be 0 to 86400 seconds, got {text}")
    return value


def some_seconds(text: str) -> float:
    """A time that isn't zero."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def kv_scales(text: str) -> str:
    """1, checkpoint, auto, or a file's whole path: processes that are started elsewhere read it too."""
    return text if text in {"1", "checkpoint", "auto"} else str(Path(text).expanduser().resolve())


def rate(text: str) -> float:
    """Tokens a second; 0 for no wait."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens a second, got {text!r}") from None
    if not (value == 0 or 0.1 <= value <= 1e9):
        raise argparse.ArgumentTypeError(f"must be 0 or 0.1 to 1e9 tokens a second, got {text}")
    return value
