"""What a client may be told is wrong, in OpenAI's shape.

    ApiError
    |-- bad_request, not_found, ...   made by the functions below
    `-- from_failure                  a worker's Failed as an error

Messages name fields and numbers, never a key, a prompt or a class of ours.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.replies import Failed, FailureCode


@dataclass(slots=True)
class ApiError(Exception):
    """An error response: status, and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400 for a field's value."""
    return ApiError(400, message, "invalid_request_error", code, param)


def unauthorized() -> ApiError:
    """401, the same for every reason: which one it was is nobody's business."""
    return ApiError(
        401, "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY'.", "invalid_request_error",
        "invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def forbidden() -> ApiError:
    """403: a valid key of the wrong kind."""
    return ApiError(403, "This API key may not do that.", "invalid_request_error", "permission_denied")


def model_not_found(name: str) -> ApiError:
    """404 for a model that nobody serves."""
    shown = name[:128]
    return ApiError(404, f"The model '{shown}' does not exist.", "invalid_request_error", "model_not_found", "model")


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """429 with a time to wait."""
    return ApiError(429, message, "rate_limit_error", "queue_full", headers={"Retry-After": str(retry_after_s)})


def unavailable(message: str, code: str = "service_unavailable", retry_after_s: int = 2) -> ApiError:
    """503 with a time to wait."""
    return ApiError(503, message, "server_error", code, headers={"Retry-After": str(retry_after_s)})


def crashed() -> ApiError:
    """500 for a bug of ours, which the log describes."""
    return ApiError(500, "The server had an error while answering.", "server_error", "internal_error")


_STATUS: dict[FailureCode, int] = {
    "internal_error": 500,
    "worker_lost": 503,
    "cancelled": 499,
    "deadline_exceeded": 504,
    "model_unavailable": 503,
    "invalid_job": 400,
    "kv_integrity_error": 500,
    "overloaded": 503,
    "shutting_down": 503,
    "access_revoked": 403,
}


def from_failure(failed: Failed) -> ApiError:
    """A worker's terminal failure as an error response."""
    status = _STATUS[failed.code]
    kind = "invalid_request_error" if status in (400, 403) else "server_error"
    return ApiError(status, failed.message, kind, failed.code)
