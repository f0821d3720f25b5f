"""The one error body of the control API, and everything that ends in it."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from molt.agents.protocol import ErrorDetail, ErrorReply
from molt.train.errors import LedgerFullError, MoltError
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
NO_ROOM_S = 5.0
"""When to ask again where the disk is full."""
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads the answer; the number is what proxies log in this case."""

log = logging.getLogger(__name__)


class ApiError(MoltError):
    """A request that is refused, as its sender will read it.

    Args:
        status: The HTTP status, 4xx or 5xx.
        message: One sentence that says what is wrong, and with which value. What it quotes is cut to fit.
        param: The field at fault, dotted.
        retry_after_s: Of a 503: when the same may be asked again, in seconds.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.message = shortened(message, MAX_MESSAGE)
        self.param = param and shortened(param, MAX_PARAM)

    def __str__(self) -> str:
        return self.message


def no_room(what: str) -> ApiError:
    """The disk is full, or nearly."""
    message = f"the server has no room on its disk: {what} until there is some (pool.min_free_mb)"
    return ApiError(503, message, retry_after_s=NO_ROOM_S)


def body_of(error: ApiError) -> bytes:
    """The one error body."""
    kind = TYPE_BY_STATUS.get(error.status, "api_error")
    return msgspec.json.encode(ErrorReply(error=ErrorDetail(type=kind, message=error.message, param=error.param)))


def respond(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The error as an answer."""
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    if error.retry_after_s is not None:
        headers = {"retry-after": str(math.ceil(error.retry_after_s))}
    return Response(body_of(error), status_code=error.status, headers=headers, media_type="application/json")


async def on_api_error(_request: Request, error: Exception) -> Response:
    """A refusal of ours."""
    assert isinstance(error, ApiError)
    return respond(error)


async def on_full_ledger(request: Request, error: Exception) -> Response:
    """The disk is full: nothing was changed, so the same can be sent again."""
    log.warning("%s %s: %s", request.method, request.scope["path"], error)
    return respond(no_room("what was sent is not kept"))


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
    LedgerFullError: on_full_ledger,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    Exception: on_fault,
}
