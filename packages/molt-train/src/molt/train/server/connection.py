"""One connection, within the limits that uvicorn has none of.

uvicorn keeps a connection open for as long as its client likes: with half a head, half a body, or a response that the
client never reads. Here each has a time in which it must get on. A request costs no timer unless it comes in parts.
"""

import asyncio
import fcntl
import logging
import socket
import termios
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from molt.train.config.sections import GatewayConfig
from molt.train.gateway.call_error import ErrorKind
from molt.train.gateway.exchange import CONNECTION
from molt.train.server.refusals import refusal

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Of a head that has not come to its end."""
_CLOSE_WAIT = 8
"""State of a TCP connection that its client alone has ended, in the numbers of Linux's tcp_info."""
_NO_TRAILERS: Any = deque(maxlen=0)
"""Keeps nothing: what stands behind a chunked body is no header."""


class JoiningTransport:
    """A transport on which one write can wait for the next. All that is not here is the transport's own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self.get_write_buffer_size = transport.get_write_buffer_size
        self._holds = False
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold(self) -> None:
        """Keep the next write until the one after it, or the end of the connection."""
        self._holds = True

    def write(self, data: bytes) -> None:
        """See `asyncio.Transport`."""
        if self._holds:
            self._holds, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        """See `asyncio.Transport`."""
        if self._held:
            self.write(b"")
        self._transport.close()


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with `gateway.header_timeout_s` and what is named after it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: GatewayConfig,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = logger  # uvicorn's own is nobody's to redact
        self._limits = limits
        self._reading: Literal["nothing", "head", "body"] = "nothing"
        self._since: float | None = None
        """When what is being read began, by the loop's clock; None between requests."""
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        """Since then."""
        self._num_unsent = 0
        """Bytes that the client had not taken when the write timer was started."""
        self._is_closed_in_order = False
        self._lost: Callable[[], None] | None = None
        """Who is to hear that the client is gone."""
        self._extensions: dict[str, Any] = {CONNECTION: self}
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`. The first head is awaited from now on."""
        self._joining = JoiningTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._joining))
        self._since = self.loop.time()
        self._check_reading_in(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._is_closed_in_order = exc is None and self._has_taken_all()
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._tell_lost()
        self._extensions = {}  # it knows this object, which knows it

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._since is None:
            self._since = self.loop.time()
        super().data_received(data)
        if self._since is None:
            return
        if self._reading == "head":
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse("headers_too_large", f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        elif self._reading == "body" and not self.cycle.response_complete:  # what nobody waits for buys no time
            self._num_body_bytes += len(data)
        if self._read_timer is None:
            self._check_reading_in(self._limits.header_timeout_s)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are no HTTP."""
        self._refuse("invalid_request", msg)

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        if self._since is None:
            self._since = self.loop.time()
        self._reading, self._num_head_bytes = "head", 0

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        super().on_headers_complete()
        self.headers = _NO_TRAILERS
        self._reading, self._num_body_bytes, self._since = "body", 0, self.loop.time()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        super().on_message_complete()
        self._reading, self._since = "nothing", None

    def on_response_complete(self) -> None:
        """Called by uvicorn. The client may still have to read, and to send the rest of a body that was refused."""
        super().on_response_complete()
        if self._reading == "body" and self.cycle.response_complete:
            self._num_body_bytes, self._since = 0, self.loop.time()
        self._watch_writing()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client is slower than we are."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_reading_in(self, delay_s: float) -> None:
        self._read_timer = self.loop.call_later(delay_s, self._check_reading)

    def _check_reading(self) -> None:
        self._read_timer = None
        if self._since is None or self.transport.is_closing():
            return
        now, limits = self.loop.time(), self._limits
        elapsed = now - self._since
        if elapsed < limits.header_timeout_s:
            self._check_reading_in(limits.header_timeout_s - elapsed)
        elif self._is_blameless(elapsed):
            self._num_body_bytes, self._since = 0, now
            self._check_reading_in(limits.header_timeout_s)
        elif self._reading == "head":
            message = f"the request's head was not complete within {limits.header_timeout_s} s"
            self._refuse("timeout", f"{message} (gateway.header_timeout_s)")
        elif self._reading == "body" and not self.cycle.response_complete:
            message = f"the request's body came at less than {limits.min_body_bytes_per_s} bytes a second"
            self._refuse("timeout", f"{message} (gateway.min_body_bytes_per_s)")
        else:
            self.transport.close()

    def _is_blameless(self, elapsed_s: float) -> bool:
        """Whether it is not the client's slowness that the request is not complete."""
        if self.flow.read_paused:
            return True
        if self._reading == "body":
            return self._num_body_bytes >= self._limits.min_body_bytes_per_s * elapsed_s
        return self._is_answering()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, kind: ErrorKind, message: str) -> None:
        """Answer in the application's place, and close; the application sees its client leave."""
        if self.transport.is_closing():
            return
        logger.info("refused a request: %s", message)
        is_answering = self._is_answering()
        if is_answering and (self.cycle.response_started or self.pipeline or self._reading == "head"):
            self.transport.abort()  # bytes of ours would stand in another request's response
            return
        begun = self._reading != "nothing"
        self.transport.write(
            refusal(
                kind,
                message,
                url=self.url if begun else b"",
                headers=self.scope["headers"] if begun else [],
            )
        )
        if is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._tell_lost()
        self.transport.close()

    def closed_in_order(self) -> bool:
        """See `Connection`."""
        return self._is_closed_in_order

    def watch(self, lost: Callable[[], None]) -> None:
        """See `Connection`."""
        self._lost = lost
        if self.transport.is_closing():
            self.loop.call_soon(self._tell_lost)
        else:
            self.flow.resume_reading()  # a long body may have stopped it, and what is not read is not noticed

    def unwatch(self, lost: Callable[[], None]) -> None:
        """See `Connection`."""
        if self._lost is lost:
            self._lost = None

    def hold(self) -> None:
        """See `Connection`."""
        self._joining.hold()

    def stays_open(self) -> bool:
        """See `Connection`."""
        return self.cycle.keep_alive

    def _tell_lost(self) -> None:
        lost, self._lost = self._lost, None
        if lost:
            lost()

    def _watch_writing(self) -> None:
        if not self.transport.get_write_buffer_size():
            return
        self._num_unsent = self._outstanding()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._check_writing)

    def _check_writing(self) -> None:
        self._write_timer = None
        if self._outstanding() < self._num_unsent:
            self._watch_writing()
            return
        logger.info("cut a connection: its client took nothing in %s s", self._limits.write_timeout_s)
        self.transport.abort()

    def _has_taken_all(self) -> bool:
        """Whether a client that ended the connection had read it to the end: of one that had not, the kernel says so.

        A client's kernel answers bytes that nobody will read with a reset, and a reset leaves no connection to wait on.
        """
        if self._outstanding():
            return False
        state = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] == _CLOSE_WAIT

    def _outstanding(self) -> int:
        """Bytes written here and not acknowledged there. The kernel takes more from us only by the megabyte."""
        queued = array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return queued[0] + self.transport.get_write_buffer_size()
