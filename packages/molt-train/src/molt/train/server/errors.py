"""The one error body of the control API, and everything that ends in it."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from molt.agents.protocol import ErrorDetail, ErrorReply
from molt.train.errors import MoltError

TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
}
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads the answer; the number is what proxies log in this case."""


class ApiError(MoltError):
    """A request that is refused, as its sender will read it.

    Args:
        status: The HTTP status, 4xx or 5xx.
        message: One sentence that says what is wrong, and with which value.
        param: The field at fault, dotted.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


def respond(error: ApiError) -> Response:
    """The error as an answer."""
    detail = ErrorDetail(type=TYPE_BY_STATUS.get(error.status, "api_error"), message=error.message, param=error.param)
    body = msgspec.json.encode(ErrorReply(error=detail))
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


async def on_api_error(_request: Request, error: Exception) -> Response:
    """A refusal of ours."""
    assert isinstance(error, ApiError)
    return respond(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """A refusal of the router."""
    assert isinstance(error, HTTPException)
    return respond(ApiError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}"))


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
