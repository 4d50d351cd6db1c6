"""Folders, and the three settings that all commands honour: SLUICEGATE_REDIS_URL, SLUICEGATE_DATA, SLUICEGATE_ADMIN_KEY."""

import json
import os
from pathlib import Path
from typing import Any

from sluicegate.errors import CommandError

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
    """--redis-url, SLUICEGATE_REDIS_URL, that of the stack in the data folder, or Redis' usual place; raises CommandError."""
    from redis.connection import parse_url

    from protocol.redis_url import cluster_node_url

    sources = (
        ("--redis-url", given),
        ("SLUICEGATE_REDIS_URL", os.environ.get("SLUICEGATE_REDIS_URL")),
        (str(data / STACK_FILE), (read_stack(data) or {}).get("redis_url")),
        ("redis_url", DEFAULT_REDIS_URL),
    )
    source, url = next((source, url) for source, url in sources if url)
    try:
        parse_url(cluster_node_url(url) or url)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, AttributeError):
        # The URL isn't shown: it may hold a password.
        raise CommandError(
            f"{source}: expected redis://[:PASSWORD@]HOST:PORT/DB, rediss://..., unix://... or redis-cluster://HOST:PORT"
        ) from None
    return str(url)
