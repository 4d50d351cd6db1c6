"""Two texts that every machine with Python has: one to calibrate with, one to measure with. They have no passage in common.

Measured is on Python's language reference (`pydoc_data.topics`), calibrated on the docstrings of its standard library. Both are under the PSF licence.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_MIN_DOCSTRING = 300
_SHARED_WORDS = 12  # a docstring with so many words in a row that the other text has too is left out


@cache
def evaluation_text() -> str:
    """Some 500,000 characters of prose: the language reference in Python's own help."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@cache
def calibration_text() -> str:
    """Docstrings of the standard library's modules in a mixed but fixed order, without those that share a passage with the other text."""
    known = set(_passages(evaluation_text()))
    kept = [text for text in set(_docstrings()) if known.isdisjoint(_passages(text))]
    return "\n\n".join(sorted(kept, key=lambda text: hashlib.sha256(text.encode()).digest()))


def _docstrings() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= _MIN_DOCSTRING:
                    yield text


def _passages(text: str) -> Iterator[tuple[str, ...]]:
    words = text.lower().split()
    for start in range(len(words) - _SHARED_WORDS + 1):
        yield tuple(words[start : start + _SHARED_WORDS])
