"""The ASGI application: routes to a desk, and everything under `/s/` to the gateway."""

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from molt.agents.protocol import (
    API_PREFIX,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
    SessionReply,
    SessionRequest,
    SessionResult,
)
from molt.train.gateway.routes import PREFIX
from molt.train.observe.metrics import CONTENT_TYPE, Metrics
from molt.train.records.recording import Recording
from molt.train.server.errors import EXCEPTION_HANDLERS, ApiError, respond
from molt.train.server.handed_over import HandedOver
from molt.train.server.requests import decode, decode_result, decode_session, read_body

T = TypeVar("T")


class Desk(Protocol):
    """Who answers the control API.

    Every method raises ApiError for what it refuses, LedgerFullError for what the disk has no room for.
    """

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Grant leases, waiting for the first. May be cancelled: the worker has gone."""
        ...

    def take_back(self, reply: LeaseReply) -> None:
        """A reply of `lease` did not reach the worker."""
        ...

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Keep leases alive."""
        ...

    async def report(self, lease_id: str, report: ResultReport) -> ResultReply:
        """Take the result of a lease; it is durable when this returns."""
        ...

    async def release(self, lease_id: str, request: ReleaseRequest) -> ResultReply:
        """Take a lease back unrun."""
        ...

    def open_session(self, request: SessionRequest) -> SessionReply:
        """Open a session that no worker drives."""
        ...

    async def finish_session(self, session_id: str, result: SessionResult) -> ResultReply:
        """Take the result of such a session."""
        ...

    def recording(self, session_id: str) -> Recording:
        """What a session has recorded so far, or recorded when it closed."""
        ...

    def status(self) -> Mapping[str, Any]:
        """The state of the run, ready for JSON."""
        ...


def create_app(desk: Desk, gateway_asgi: ASGIApp, metrics: Metrics, *, token: str) -> ASGIApp:
    """The application of one server.

    Args:
        desk: Answers the control API.
        gateway_asgi: Takes every request under `/s/`, unrouted and unauthenticated: sessions have keys of their own.
        metrics: What `/metrics` shows.
        token: The bearer token of the control API.
    """

    async def show_metrics(_request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    control = Starlette(
        routes=[
            Mount(
                API_PREFIX,
                app=Router(_ControlApi(desk).routes(), redirect_slashes=False),
                middleware=[Middleware(_BearerAuth, token=token)],
            ),
            Route("/metrics", show_metrics, methods=["GET"]),
            Route("/api/hello", _hello, methods=["GET"]),
            Route("/", _hello, methods=["HEAD"]),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    # A redirect would name the host that the client says we are.
    control.router.redirect_slashes = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Model calls are nearly all of the traffic, so they pass no router on their way.
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            await gateway_asgi(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
        else:
            await control(scope, receive, send)

    return app


class _BearerAuth:
    """Lets requests with the token through, and tells the others nothing of which paths exist."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        if not token:
            raise ValueError("the control API needs a token")
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, credentials = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(credentials.strip(), self._token):
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "the control API needs 'authorization: Bearer TOKEN' with the server's token")
            await respond(error)(scope, receive, send)


class _ControlApi:
    """Each endpoint: decode, ask the desk, encode."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[Route]:
        return [
            Route("/leases", self._lease, methods=["POST"]),
            Route("/heartbeat", self._heartbeat, methods=["POST"]),
            Route("/leases/{id}/result", self._report, methods=["POST"]),
            Route("/leases/{id}/release", self._release, methods=["POST"]),
            Route("/sessions", self._open_session, methods=["POST"]),
            Route("/sessions/{id}", self._recording, methods=["GET"]),
            Route("/sessions/{id}/result", self._finish_session, methods=["POST"]),
            Route("/status", self._status, methods=["GET"]),
        ]

    async def _lease(self, request: Request) -> Response:
        desk = self._desk
        leases = desk.lease(decode(await read_body(request), LeaseRequest))
        reply = await _while_connected(request, leases, lost=desk.take_back)
        return HandedOver(msgspec.json.encode(reply), lost=lambda: desk.take_back(reply))

    async def _heartbeat(self, request: Request) -> Response:
        return _json(self._desk.heartbeat(decode(await read_body(request), HeartbeatRequest)))

    async def _report(self, request: Request) -> Response:
        report = decode_result(await read_body(request), ResultReport)
        return _verdict(await self._desk.report(request.path_params["id"], report))

    async def _release(self, request: Request) -> Response:
        release = decode(await read_body(request), ReleaseRequest)
        return _verdict(await self._desk.release(request.path_params["id"], release))

    async def _open_session(self, request: Request) -> Response:
        return _json(self._desk.open_session(decode_session(await read_body(request))), status=201)

    async def _recording(self, request: Request) -> Response:
        return _json(self._desk.recording(request.path_params["id"]))

    async def _finish_session(self, request: Request) -> Response:
        result = decode_result(await read_body(request), SessionResult)
        return _verdict(await self._desk.finish_session(request.path_params["id"], result))

    async def _status(self, _request: Request) -> Response:
        return _json(self._desk.status())


async def _hello(_request: Request) -> Response:
    return Response(status_code=200)


def _json(body: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _verdict(reply: ResultReply) -> Response:
    return _json(reply, status=200 if reply.accepted else 409)


async def _while_connected(request: Request, answer: Coroutine[Any, Any, T], *, lost: Callable[[T], None]) -> T:
    """Wait for an answer for as long as there is somebody to give it to; its request's body must have been read.

    Without this, a worker that dies in a long poll would be granted leases that run out before another gets them.

    Raises:
        ClientDisconnect: The client hung up first. The answer was cancelled; where it came at the same moment, `lost`
            was told of it.
    """
    task = asyncio.create_task(answer)
    hung_up = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        is_there = not hung_up.done()
    finally:
        for pending in (task, hung_up):
            pending.cancel()
        await asyncio.wait({task, hung_up})
    if is_there:
        return task.result()
    if not task.cancelled() and task.exception() is None:
        lost(task.result())
    raise ClientDisconnect
