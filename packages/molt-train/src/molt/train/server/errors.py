"""The one error body of the control API, and everything that ends in it."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from molt.agents.protocol import ErrorDetail, ErrorReply
from molt.train.errors import MoltError
from molt.train.gateway.call_error import MAX_MESSAGE, MAX_PARAM, shortened

TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    431: "request_too_large",
    503: "overloaded_error",
}
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads the answer; the number is what proxies log in this case."""


class ApiError(MoltError):
    """A request that is refused, as its sender will read it.

    Args:
        status: The HTTP status, 4xx or 5xx.
        message: One sentence that says what is wrong, and with which value. What it quotes is cut to fit.
        param: The field at fault, dotted.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = shortened(message, MAX_MESSAGE)
        self.param = param and shortened(param, MAX_PARAM)

    def __str__(self) -> str:
        return self.message


def body_of(error: ApiError) -> bytes:
    """The one error body."""
    kind = TYPE_BY_STATUS.get(error.status, "api_error")
    return msgspec.json.encode(ErrorReply(error=ErrorDetail(type=kind, message=error.message, param=error.param)))


def respond(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The error as an answer."""
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(body_of(error), status_code=error.status, headers=headers, media_type="application/json")


async def on_api_error(_request: Request, error: Exception) -> Response:
    """A refusal of ours."""
    assert isinstance(error, ApiError)
    return respond(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """A refusal of the router."""
    assert isinstance(error, HTTPException)
    refused = ApiError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}")
    return respond(refused, error.headers)  # of a 405 `allow`


async def on_disconnect(_request: Request, _error: Exception) -> Response:
    """The client hung up in the middle of its request, or of a long poll."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_fault(request: Request, _error: Exception) -> Response:
    """A fault of the server's; Starlette passes the error on to the log after this answer."""
    return respond(ApiError(500, f"the server failed on {request.method} {request.scope['path']}; its log says why"))


EXCEPTION_HANDLERS: dict[Any, Any] = {
    ApiError: on_api_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    Exception: on_fault,
}
