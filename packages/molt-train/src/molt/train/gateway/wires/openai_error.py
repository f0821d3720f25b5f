"""The error body that the OpenAI wires share."""

import msgspec

from molt.train.gateway.call_error import CallError, ErrorKind

_TABLE: dict[ErrorKind, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "prompt_too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "method_not_allowed": (405, "invalid_request_error", "method_not_allowed"),
    "timeout": (408, "invalid_request_error", "request_timeout"),
    "closed": (410, "invalid_request_error", "session_closed"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "unsupported_media": (415, "invalid_request_error", "unsupported_content_encoding"),
    "headers_too_large": (431, "invalid_request_error", "headers_too_large"),
    "engine": (500, "server_error", "engine_error"),
    "not_implemented": (501, "invalid_request_error", "not_implemented"),
    "overloaded": (503, "server_error", "overloaded"),
}


def openai_error(error: CallError, request_id: str) -> tuple[int, bytes]:  # noqa: ARG001 - this body names no request
    """Status and body of an error."""
    status, kind, code = _TABLE[error.kind]
    message = error.message
    if error.kind == "prompt_too_long":
        message = f"this model's maximum context length is exceeded: {message}"
    body = {"message": message, "type": kind, "param": error.param, "code": error.code or code}
    return status, msgspec.json.encode({"error": body})
