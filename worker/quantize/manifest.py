"""The record of a result folder: of what, with which settings, and which files are finished. It makes the folder ours, and a killed run resumable."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.quantize.errors import QuantizeError

MANIFEST = "sluicegate-quantize.json"
_FORMAT = 1


@dataclass(slots=True)
class Manifest:
    """Digests are sha256, hexadecimal, by file name. `settings` and the source's digests must be the same for a run to go on."""

    folder: Path
    settings: dict[str, Any]
    source: dict[str, str] = field(default_factory=dict)
    result: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False

    def write(self) -> None:
        """Replace the file, whole or not at all."""
        content = {
            "format": _FORMAT, "is_complete": self.is_complete, "settings": self.settings, "source": self.source,
            "result": self.result,
        }  # fmt: skip
        write_whole(self.folder / MANIFEST, json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")

    def check_source(self, files: Mapping[str, Path]) -> None:
        """Raise QuantizeError if a file of the source that went into the result is another one now."""
        for name, digest in self.source.items():
            if name not in files or digest_of(files[name]) != digest:
                raise QuantizeError(f"{self.folder}: was begun from another {name}; remove the folder to start anew")

    def finished(self, file: str) -> bool:
        """Whether a file is there, with the bytes that it was finished with."""
        path = self.folder / file
        return file in self.result and path.is_file() and digest_of(path) == self.result[file]


def open_result(folder: Path, settings: dict[str, Any]) -> Manifest:
    """The manifest of an empty folder, or of one that a run with the same settings began. Raises QuantizeError for any other."""
    path = folder / MANIFEST
    if not path.exists():
        strange = [entry.name for entry in folder.iterdir() if entry.name != MANIFEST + ".part"]
        if strange:
            raise QuantizeError(f"{folder}: holds {strange[0]!r} and was not made by this command; name a new folder")
        manifest = Manifest(folder, settings)
        manifest.write()
        return manifest
    manifest = _read(path)
    different = sorted(
        key for key in settings.keys() | manifest.settings.keys() if settings.get(key) != manifest.settings.get(key)
    )
    if different:
        key = different[0]
        raise QuantizeError(
            f"{folder}: was begun with {key} {_short(manifest.settings.get(key))}, not {_short(settings.get(key))}; "
            "use the same settings or another folder"
        )
    return manifest


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Makes the folder if need be and keeps other processes of this command out; one that dies lets go. Raises QuantizeError if one is at work."""
    if not folder.parent.is_dir():
        raise QuantizeError(f"{folder.parent}: no such folder")
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise QuantizeError(f"{folder}: another process is writing it") from None
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, and rename it when it's on the disk."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def digest_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> Manifest:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise QuantizeError(f"{path}: has format {content['format']!r}, which this version doesn't know")
        tables = [content[name] for name in ("settings", "source", "result")]
        if not all(isinstance(table, dict) for table in tables) or type(content["is_complete"]) is not bool:
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise QuantizeError(f"{path}: is no manifest of this command") from None
    return Manifest(path.parent, tables[0], tables[1], tables[2], is_complete=content["is_complete"])


def _short(value: Any) -> str:
    return json.dumps(value)[:60]
