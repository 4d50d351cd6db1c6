"""The installation's secrets: private files, made once, the same for everybody."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.signing import derive_key
from sluicegate.errors import CommandError
from sluicegate.secrets import MASTER_FILE, admin_key, derived_keys, stored

MASTER = "ab" * 32


def test_secrets_are_for_their_owner_only(data: Path) -> None:
    """The folder is 0700 and each file 0600, whatever the umask."""
    before = os.umask(0)
    try:
        derived_keys(data)
        admin_key(data)
    finally:
        os.umask(before)
    folder = data / "secrets"
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert {"admin.key": 0o600, "master.key": 0o600} == {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()
    }


def test_an_open_folder_is_closed(data: Path) -> None:
    """A secrets folder that others could enter is made private at the next use."""
    (data / "secrets").mkdir(parents=True, mode=0o755)
    derived_keys(data)
    assert 0o700 == stat.S_IMODE((data / "secrets").stat().st_mode)


def test_keys_survive(data: Path) -> None:
    """The second start has the keys of the first."""
    assert derived_keys(data) == derived_keys(data)
    assert admin_key(data) == admin_key(data)


def test_two_installations_share_no_key(tmp_path: Path) -> None:
    """A master key has 32 random bytes of its own, and a key for each purpose."""
    one, two = derived_keys(tmp_path / "one"), derived_keys(tmp_path / "two")
    keys = [k for keys in (one, two) for k in (keys.key_pepper, keys.job_signing, keys.kv_namespaces)]
    assert 6 == len(set(keys))
    assert 32 == len(bytes.fromhex((tmp_path / "one" / "secrets" / MASTER_FILE).read_text()))


def test_processes_that_start_together_agree(data: Path) -> None:
    """Eight processes that all find no master key end up with one."""
    code = (
        "import sys, pathlib; from sluicegate.secrets import derived_keys; sys.stdin.readline();"
        "print(derived_keys(pathlib.Path(sys.argv[1])).job_signing.hex())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert 1 == len({process.communicate(timeout=60)[0] for process in processes})
    assert [MASTER_FILE] == [path.name for path in (data / "secrets").iterdir()]


def test_the_environment_gives_the_master_key(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLUICEGATE_MASTER_KEY is used as it is, and nothing is written."""
    monkeypatch.setenv("SLUICEGATE_MASTER_KEY", MASTER)
    assert derive_key(bytes.fromhex(MASTER), "job-signing") == derived_keys(data).job_signing
    assert not data.exists()


def test_a_file_gives_the_master_key(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLUICEGATE_MASTER_KEY_FILE may end with a newline."""
    (tmp_path / "key").write_text(MASTER + "\n")
    monkeypatch.setenv("SLUICEGATE_MASTER_KEY_FILE", str(tmp_path / "key"))
    assert derive_key(bytes.fromhex(MASTER), "api-key-pepper") == derived_keys(data).key_pepper


def test_the_environment_gives_the_admin_key(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLUICEGATE_ADMIN_KEY stands before the stored one."""
    monkeypatch.setenv("SLUICEGATE_ADMIN_KEY", "sk-of-the-operator")
    assert "sk-of-the-operator" == admin_key(data)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLUICEGATE_MASTER_KEY", "not hex", "SLUICEGATE_MASTER_KEY: must be hexadecimal"),
        ("SLUICEGATE_MASTER_KEY", "ab" * 31, "SLUICEGATE_MASTER_KEY: must have at least 32 bytes"),
        ("SLUICEGATE_MASTER_KEY", "", "SLUICEGATE_MASTER_KEY: must have at least 32 bytes"),
        ("SLUICEGATE_MASTER_KEY_FILE", "/nowhere", r"SLUICEGATE_MASTER_KEY_FILE \(/nowhere\): cannot be read"),
    ],
)
def test_a_bad_master_key_names_its_variable(
    data: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """What is wrong, and where it came from; never the key."""
    monkeypatch.setenv(name, value)
    with pytest.raises(CommandError, match=message):
        derived_keys(data)


@pytest.mark.parametrize("content", ["", "zz", "abcd"])
def test_a_damaged_master_key_stops_the_start(data: Path, content: str) -> None:
    """A damaged file isn't replaced: that would lock out every tenant."""
    (data / "secrets").mkdir(parents=True)
    (data / "secrets" / MASTER_FILE).write_text(content)
    with pytest.raises(CommandError, match=r"master\.key"):
        derived_keys(data)
    assert content == (data / "secrets" / MASTER_FILE).read_text()


def test_no_key_is_made_when_making_fails(data: Path) -> None:
    """A failure on the way leaves no file that the next start would take for a secret."""

    def make() -> str:
        raise OSError("no randomness")

    with pytest.raises(CommandError, match="no randomness"):
        stored(data, "some.key", make)
    assert not (data / "secrets" / "some.key").exists()


def test_keys_are_not_shown(data: Path) -> None:
    """The keys' repr holds none of them."""
    keys = derived_keys(data)
    assert "DerivedKeys()" == repr(keys)
