"""The installation's secrets, in files that only their owner can read.

All keys are derived from one master key. It is in DATA/secrets/master.key, made at the first start, or given by SLUICEGATE_MASTER_KEY (hex) or
SLUICEGATE_MASTER_KEY_FILE. Gateways, workers and commands of one installation need the same one.
"""

import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.signing import MIN_MASTER_SECRET_BYTES, derive_key
from protocol.tenancy import key_digest, new_api_key
from sluicegate.errors import CommandError

MASTER_FILE, ADMIN_FILE, DEMO_FILE, REDIS_FILE = "master.key", "admin.key", "demo.key", "redis.key"


@dataclass(frozen=True, slots=True)
class DerivedKeys:
    """One key for each purpose."""

    key_pepper: bytes = field(repr=False)
    job_signing: bytes = field(repr=False)
    kv_namespaces: bytes = field(repr=False)
    routing: bytes = field(repr=False)


def derived_keys(data: Path) -> DerivedKeys:
    """The keys of the installation in a data folder; raises CommandError."""
    master = _master_key(data)
    purposes = ("api-key-pepper", "job-signing", "kv-namespaces", "routing")
    return DerivedKeys(*(derive_key(master, purpose) for purpose in purposes))


def admin_key(data: Path) -> str:
    """The operator's key: SLUICEGATE_ADMIN_KEY, or that in the data folder, made if need be. Raises CommandError."""
    given = os.environ.get("SLUICEGATE_ADMIN_KEY")
    if given and key_digest(b"", given) is None:
        raise CommandError("SLUICEGATE_ADMIN_KEY: must have 8 to 256 printable ASCII characters without spaces")
    return given or stored(data, ADMIN_FILE, new_api_key)


def stored(data: Path, name: str, make: Callable[[], str]) -> str:
    """The secret in a file, made at the first call. Two processes that make it at once end up with the same one."""
    folder = data / "secrets"
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not path.exists():
            # Written aside and linked into place: the name appears with its whole content, and only once.
            handle, temporary = tempfile.mkstemp(dir=folder)  # mode 0600
            with os.fdopen(handle, "w") as file:
                file.write(make())
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                os.unlink(temporary)
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read or make the secret {path}: {error}") from None
    if not text:
        raise CommandError(f"the secret {path} is empty; remove the file to have a new one made")
    return text


def replaced(data: Path, name: str, text: str) -> str:
    """Put another secret in the place of a stored one."""
    folder = data / "secrets"
    handle, temporary = tempfile.mkstemp(dir=folder)  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).replace(folder / name)
    return text


def _master_key(data: Path) -> bytes:
    source = "SLUICEGATE_MASTER_KEY"
    text = os.environ.get(source)
    file = os.environ.get("SLUICEGATE_MASTER_KEY_FILE")
    if text is None and file is not None:
        source = f"SLUICEGATE_MASTER_KEY_FILE ({file})"
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{source}: cannot be read: {error}") from None
    if text is None:
        source = str(data / "secrets" / MASTER_FILE)
        text = stored(data, MASTER_FILE, lambda: secrets.token_hex(MIN_MASTER_SECRET_BYTES))
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise CommandError(f"{source}: must be hexadecimal") from None
    if len(key) < MIN_MASTER_SECRET_BYTES:
        raise CommandError(f"{source}: must have at least {MIN_MASTER_SECRET_BYTES} bytes")
    return key
