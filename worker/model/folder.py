"""Files of a model's folder. Nothing outside it is ever opened."""

import json
from pathlib import Path
from typing import Any

from worker.model.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # reading one runs code of whoever wrote it


def inside(folder: Path, name: str) -> Path:
    """The path of a regular file, there or not, in the folder itself, links followed; raises ModelError for any other."""
    path = folder / name
    if not name.isprintable() or len(name.encode()) > 255 or Path(name).name != name:
        raise ModelError(f"{folder}: {name[:100]!r} is no file name")
    if path.resolve().parent != folder.resolve():
        raise ModelError(f"{folder}: {name!r} lies outside the model folder")
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ModelError(f"{path}: is no regular file")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in the folder; raises ModelError."""
    path = folder / name
    try:
        value = json.loads(inside(folder, name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return value


def refuse_pickle(path: Path) -> None:
    """Raise ModelError for a file that is a pickle by its name."""
    if path.suffix.lower() in PICKLES:
        raise ModelError(f"{path}: is a pickle, which could run code when it is read; save the model as safetensors")
