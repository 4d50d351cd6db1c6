"""Where folders and settings come from."""

from pathlib import Path

import pytest

from sluicegate.environment import DEFAULT_REDIS_URL, data_folder, home, read_stack, redis_url


def _write_stack(data: Path, text: str) -> None:
    data.mkdir()
    (data / "stack.json").write_text(text)


def test_the_home_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without SLUICEGATE_HOME it's ~/.cache/sluicegate."""
    monkeypatch.delenv("SLUICEGATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / ".cache" / "sluicegate" == home()


def test_a_data_folder_is_chosen_by_flag_variable_and_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this order; a relative one is made absolute, since children may have another folder."""
    assert tmp_path / "home" / "stack" == data_folder(None)
    monkeypatch.setenv("SLUICEGATE_DATA", str(tmp_path / "variable"))
    assert tmp_path / "variable" == data_folder(None)
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "flag" == data_folder("flag")


def test_redis_is_chosen_by_flag_variable_stack_and_default(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """In this order."""
    assert DEFAULT_REDIS_URL == redis_url(None, data)
    _write_stack(data, '{"redis_url": "redis://stack:1/0"}')
    assert "redis://stack:1/0" == redis_url(None, data)
    monkeypatch.setenv("SLUICEGATE_REDIS_URL", "redis://variable:1/0")
    assert "redis://variable:1/0" == redis_url(None, data)
    assert "redis://flag:1/0" == redis_url("redis://flag:1/0", data)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "\x00"])
def test_a_damaged_stack_file_is_none(data: Path, text: str) -> None:
    """What isn't a JSON object describes no stack."""
    _write_stack(data, text)
    assert read_stack(data) is None
