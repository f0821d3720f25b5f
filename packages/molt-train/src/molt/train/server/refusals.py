"""Answers to requests that never become any for the application, in the shape of the path they were on the way to."""

import secrets
import urllib.parse
from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from molt.train.gateway.call_error import CallError, ErrorKind
from molt.train.gateway.routes import PREFIX, dialect_of, split
from molt.train.server.errors import ApiError, body_of

_STATUS: dict[ErrorKind, int] = {"invalid_request": 400, "timeout": 408, "headers_too_large": 431}
"""On the control API; the wires have their own."""


def refusal(kind: ErrorKind, message: str, *, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole HTTP response that ends its connection; `url` and `headers` may be cut off anywhere."""
    path = urllib.parse.unquote(url.partition(b"?")[0].decode("latin-1"))
    request_id = "req_" + secrets.token_hex(12)
    if path.startswith(PREFIX):
        dialect = dialect_of(split(path)[1], dict(headers))
        status, body = dialect.error(CallError(kind, message), request_id)
    else:
        status = _STATUS[kind]
        body = body_of(ApiError(status, message))
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"request-id: {request_id}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return STATUS_LINE[status] + head.encode() + body
