"""Errors as HTTP responses. Apart from `errors`, which intake processes use without aiohttp."""

from aiohttp import web

from gateway.errors import ApiError


def error_response(error: ApiError) -> web.Response:
    """An error in OpenAI's shape."""
    headers = {"Content-Type": "application/json; charset=utf-8", **error.headers}
    status = 503 if error.status == 499 else error.status
    return web.Response(status=status, body=error.body(), headers=headers)


def from_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own errors (no such route, wrong method, an expectation that nobody meets) as ours."""
    if error.status == 404:
        return ApiError(404, "There is no such route.", "invalid_request_error", "not_found")
    if error.status == 417:
        return ApiError(417, "Only 'Expect: 100-continue' is supported.", "invalid_request_error", "expectation_failed")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"This route takes {allowed}."
        return ApiError(405, message, "invalid_request_error", "method_not_allowed", headers={"Allow": allowed})
    return ApiError(error.status, error.reason, "invalid_request_error", None)
