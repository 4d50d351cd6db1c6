"""The names that cross process borders, each a type of its own."""

import re
import secrets
from typing import NewType

from protocol.errors import InvalidNameError

TenantId = NewType("TenantId", str)
RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
ModelName = NewType("ModelName", str)

# Braces would move a Redis key to another cluster slot, and colons would let one name run into the next part of a key.
TENANT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
MODEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_TENANT = re.compile(TENANT_PATTERN)
_MODEL = re.compile(MODEL_PATTERN)


def new_request_id() -> RequestId:
    """A request's internal name: made here and unguessable, never taken from a client."""
    return RequestId(secrets.token_hex(16))


def new_process_id(kind: str) -> str:
    """The name of one run of a process: a restarted process is somebody else."""
    return f"{kind}-{secrets.token_hex(8)}"


def parse_tenant_id(text: str) -> TenantId:
    """Check a tenant id from outside; raises InvalidNameError."""
    if not _TENANT.fullmatch(text):
        raise InvalidNameError("tenant", text, "1-64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
    return TenantId(text)


def parse_model_name(text: str) -> ModelName:
    """Check a model name from outside; raises InvalidNameError."""
    if not _MODEL.fullmatch(text):
        raise InvalidNameError("model", text, "1-128 of A-Z a-z 0-9 . _ - /, beginning with a letter or digit")
    return ModelName(text)
