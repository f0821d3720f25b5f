"""The listening socket, and uvicorn inside a running event loop."""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from molt.train.config.sections import GatewayConfig
from molt.train.errors import ConfigError, RunError
from molt.train.server.connection import BoundedConnection

MIN_TOKEN_CHARS = 16
"""Of the token on an address that other machines can reach: what guards a shared network is not to be guessed."""
BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than any client of ours keeps an idle connection, so that it is the client who closes it: a server that closes
first breaks the request that is just being sent."""
_PROBE_AFTER_S, _PROBE_EVERY_S = 30, 10
"""Of a connection on which nothing comes or goes, so that a client that lost its power or its route is noticed while it
waits for a reply; the kernel's own two hours are longer than any reply."""


def bind(host: str, port: int, *, token: str) -> socket.socket:
    """Take the port, before anything expensive starts. 0 takes any free one.

    It does not listen yet: until `HttpServer.start` clients are told at once that nobody is there, and try again.

    Raises:
        ConfigError: The port is taken or not allowed, the host is unknown, or a host that other machines can reach is
            to be opened without a token, or with a short one.
    """
    where = f"server.host={host!r}, server.port={port}"
    if not 0 <= port <= 65535:
        raise ConfigError(f"{where}: a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"{where}: no such address ({error.strerror}); give a name or an IP of this machine"
        ) from None
    family, kind, protocol, _, address = found[0]
    is_loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    if not is_loopback and len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{where}: other machines can reach this address; set server.token to {MIN_TOKEN_CHARS} characters or "
            "more, or use 127.0.0.1"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        # Inherited by the connections: an answer written in two parts must not wait 40 ms for the first one's ACK.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what holds it, or set server.port=0 for a free one"
            ) from None
        raise ConfigError(f"{where}: cannot listen there: {error.strerror}") from None
    return sock


class HttpServer:
    """Serves `app` on a bound socket, in the event loop that runs when `start` is called.

    `url` is its origin, `http://host:port`, for clients on this machine. `limits` bounds each connection: its head,
    the rate of its bodies, and how long its client may leave what it is sent; by default as the keys' defaults do.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, limits: GatewayConfig | None = None) -> None:
        limits = limits or GatewayConfig()
        self.url = origin(sock)
        self._sock = sock
        _notice_lost_clients(sock, limits.write_timeout_s)
        self._server = _EmbeddedServer(
            uvicorn.Config(
                app,
                http=functools.partial(BoundedConnection, limits=limits),  # pyright: ignore[reportArgumentType]
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve. Returns when requests are answered. Raises RunError when the server does not come up."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="http-server")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            error = self._task.exception()
            raise RunError(f"the HTTP server at {self.url} did not start: {error}") from error

    async def stop(self, *, grace_s: int = 5) -> None:
        """Take no more requests, let those under way end within `grace_s` seconds, and close every connection."""
        if self._task is None:
            self._sock.close()
            return
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.should_exit = True
        await self._task


def _notice_lost_clients(sock: socket.socket, write_timeout_s: float) -> None:
    """Have the kernel break connections of `sock` whose client answers no probe, or takes nothing, for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
        (socket.TCP_USER_TIMEOUT, max(1, int(write_timeout_s * 1000))),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn that leaves the process's signal handlers alone, and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def origin(sock: socket.socket) -> str:
    """`http://host:port` of a bound socket, for clients on this machine."""
    host, port, *_ = sock.getsockname()
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
