"""Folders, and the three settings that all commands honour: SLUICEGATE_REDIS_URL, SLUICEGATE_DATA, SLUICEGATE_ADMIN_KEY."""

import json
import os
from pathlib import Path
from typing import Any

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
STACK_FILE = "stack.json"


def home() -> Path:
    """Where downloads, and by default the stack's data, are kept: SLUICEGATE_HOME or ~/.cache/sluicegate."""
    return Path(os.environ.get("SLUICEGATE_HOME") or Path.home() / ".cache" / "sluicegate").expanduser()


def data_folder(given: str | None) -> Path:
    """A stack's data: --data, SLUICEGATE_DATA, or `stack` in the home folder."""
    return Path(given or os.environ.get("SLUICEGATE_DATA") or home() / "stack").expanduser().resolve()


def read_stack(data: Path) -> dict[str, Any] | None:
    """The running stack's description, if there is one."""
    try:
        value = json.loads((data / STACK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def redis_url(given: str | None, data: Path) -> str:
    """--redis-url, SLUICEGATE_REDIS_URL, that of the stack in the data folder, or Redis' usual place."""
    stack = read_stack(data)
    return given or os.environ.get("SLUICEGATE_REDIS_URL") or (stack or {}).get("redis_url") or DEFAULT_REDIS_URL
