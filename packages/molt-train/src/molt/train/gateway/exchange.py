"""One HTTP exchange over raw ASGI: the body within its limit, the reply, and whether the client is still there."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec

from molt.train.gateway.call_error import CallError
from molt.train.gateway.content_encoding import IDENTITY, normalise, too_large, unpack

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

NO_CONTENT = 204
CONNECTION = "molt.connection"
"""Extension of the ASGI scope: what the server knows of the connection, a `Connection`. A server without it is asked
for `http.disconnect`, which takes a task for each request."""

_TURNS_TO_NOTICE, _TURNS_OF_A_TASK = 2, 2
"""Of the event loop, from a failed write to who hears of it: read, lost connection; then event, task."""

_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_CLIENT_HEADERS = frozenset(
    b"anthropic-beta anthropic-version session-id thread-id user-agent x-claude-code-session-id x-client-request-id "
    b"x-codex-turn-metadata x-parent-session-id x-session-affinity x-session-id x-stainless-retry-count".split()
)
_MAX_HINT_BYTES = 2048


class Connection(Protocol):
    """What a server tells of the connection that a request came on."""

    def closed_in_order(self) -> bool:
        """Whether the client of a lost connection had read it to the end."""
        ...

    def watch(self, lost: Callable[[], None]) -> None:
        """Have `lost` called when the connection is lost."""
        ...

    def unwatch(self, lost: Callable[[], None]) -> None:
        """No more; nothing, where another request is watched by now."""
        ...

    def hold(self) -> None:
        """Let what is written next wait for what is written after it: one packet, and the client wakes up once."""
        ...

    def stays_open(self) -> bool:
        """Whether the server keeps the connection when the response has ended."""
        ...


class Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = "req_" + os.urandom(12).hex()
        self.streaming = False
        """The head of an event stream has been sent."""
        self.gone = False
        """The client closed the connection before the response was complete."""
        self.failure: Callable[[CallError, str], bytes] = _nothing
        """The last events of a stream that ends in an error; to be set before one begins."""
        self._connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        self._lost: Callable[[], None] | None = None
        """Called by the connection that is watched."""
        self._receive, self._send = receive, send
        self._watcher: asyncio.Task[None] | None = None
        self._pulse_timer: asyncio.TimerHandle | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._rhythm: _Rhythm | None = None
        self._writing = asyncio.Lock()
        self._last_write = 0.0
        self._last_written = False
        self._ended = False

    @property
    def lost(self) -> bool:
        """The connection is no more, whether the watcher has heard of it or not: what was just written went nowhere."""
        return self.gone or self._was_closed_in_order()

    @property
    def broken(self) -> bool:
        """The client is gone, and left something unread. One that has its reply may well close at once."""
        return self.gone and not self._was_closed_in_order()

    @property
    def client(self) -> bytes:
        """What the headers say of the client, as far as it helps to attribute a call: a JSON object."""
        return _hints(tuple([(name, self.headers[name]) for name in self.headers if name in _CLIENT_HEADERS]))

    async def body(self, max_bytes: int) -> bytes:
        """The request's body, unpacked.

        Raises:
            CallError: It is longer than `max_bytes`, packed in a way that is not read here, or cut off.
        """
        coding = normalise(self.headers.get(b"content-encoding", IDENTITY))
        declared = self.headers.get(b"content-length", b"0")
        is_too_large = declared.isdigit() and int(declared) > max_bytes
        parts, size, more = [], 0, True
        while more and not is_too_large:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise CallError("invalid_request", "the body was cut off")
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
            size += len(parts[-1])
            is_too_large = size > max_bytes
        if is_too_large:
            raise too_large(max_bytes)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return body if coding == IDENTITY else await asyncio.to_thread(unpack, body, coding, max_bytes)

    async def respond(self, status: int, body: bytes, headers: Headers = ()) -> None:
        """Send a whole JSON response; to HEAD, its head."""
        length = [] if status == NO_CONTENT else [(b"content-length", b"%d" % len(body))]
        await self._head(status, [*([_JSON] if body else []), *length, *headers])
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def write(self, data: bytes) -> None:
        """Send events; the first write opens the stream."""
        async with self._writing:
            await self._write(data)

    async def write_last(self, data: bytes) -> None:
        """Send the last events. Nothing, and no keep-alive, comes after them but `end`."""
        self._last_written = True
        self._stop_pulse()
        async with self._writing:
            await self._write(data, ends=self._ends_at_once())

    async def write_whole(self, body: bytes) -> None:
        """Send a whole JSON response; `end` is to follow."""
        await self._head(200, [_JSON, (b"content-length", b"%d" % len(body))])
        await self._body(body, ends=self._ends_at_once())

    async def settle(self) -> None:
        """Give the event loop the turns in which it notices that the socket had been reset before the last write."""
        await _Turns(_TURNS_TO_NOTICE + (_TURNS_OF_A_TASK if self._watcher else 0))

    async def end(self) -> None:
        """End the response, and stop watching."""
        self._stop_watching()  # a server that is asked for it calls the end of a response a disconnect too
        if not self._ended:
            await self._body(b"", ends=True)

    def watch(self, left: Callable[[], None] = lambda: None) -> None:
        """From now on notice when the client goes away: `gone` turns true, and `left` is called, once."""

        def lost() -> None:
            self.gone = True
            self._stop_pulse()
            left()

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            lost()

        if self._connection:
            self._stop_watching()
            self._lost = lost
            self._connection.watch(lost)
        else:
            self._watcher = asyncio.get_running_loop().create_task(wait())

    def keep_alive(
        self, every_s: float, beat: Callable[[], bytes], opens_in: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Write what `beat` returns whenever nothing was written for `every_s` seconds.

        `beat` is called when its bytes are written next, so that it can number them. As long as no stream is open,
        `opens_in` says in how many seconds it is to be at the latest.
        """
        loop = asyncio.get_running_loop()
        self._last_write = loop.time()
        self._rhythm = _Rhythm(every_s, beat, opens_in)
        self._pulse_timer = loop.call_later(min(every_s, opens_in()), self._check_pulse)

    def close(self) -> None:
        """Stop watching and keeping alive, and let go of who writes the reply, who has hold of this exchange."""
        self.failure, self._rhythm = _nothing, None
        self._stop_pulse()
        self._stop_watching()
        if self._pulse:
            self._pulse.cancel()

    def _check_pulse(self) -> None:
        loop, rhythm = asyncio.get_running_loop(), self._rhythm
        if rhythm is None:
            return
        wait = self._last_write + rhythm.every_s - loop.time()
        if not self.streaming:
            wait = min(wait, rhythm.opens_in())
        if wait <= 0:
            wait = rhythm.every_s / 4
            if not self._writing.locked():
                self._pulse = loop.create_task(self._write_beat(rhythm))
        self._pulse_timer = loop.call_later(wait, self._check_pulse)

    async def _write_beat(self, rhythm: "_Rhythm") -> None:
        async with self._writing:
            if not self._last_written:
                await self._write(rhythm.beat())

    async def _write(self, data: bytes, *, ends: bool = False) -> None:
        if not self.streaming:
            self.streaming = True
            await self._head(200, _EVENT_STREAM)
        await self._body(data, ends=ends)
        self._last_write = asyncio.get_running_loop().time()

    def _stop_pulse(self) -> None:
        if self._pulse_timer:
            self._pulse_timer.cancel()

    def _stop_watching(self) -> None:
        if self._connection and self._lost:
            self._connection.unwatch(self._lost)
            self._lost = None
        elif self._watcher:
            self._watcher.cancel()

    def _was_closed_in_order(self) -> bool:
        return self._connection is not None and self._connection.closed_in_order()

    def _ends_at_once(self) -> bool:
        """Whether the last bytes can end the response, too: the connection is watched all the same, and stays."""
        return self._connection is not None and self._connection.stays_open()

    async def _head(self, status: int, headers: Headers) -> None:
        if self._connection and self.method != "HEAD":
            self._connection.hold()
        request_id = self.request_id.encode()
        identity = [(b"request-id", request_id), (b"x-request-id", request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *identity]})

    async def _body(self, data: bytes, *, ends: bool) -> None:
        self._ended = ends
        await self._send({"type": "http.response.body", "body": data, "more_body": not ends})


class _Turns:
    """Lets the event loop turn a number of times, for less than as many `asyncio.sleep(0)`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __await__(self) -> Generator[None]:
        for _ in range(self._number):
            yield


@lru_cache(maxsize=256)
def _hints(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return msgspec.json.encode(
        {name.decode("latin-1"): value[:_MAX_HINT_BYTES].decode("latin-1") for name, value in headers}
    )


def _nothing(_error: CallError, _request_id: str) -> bytes:
    return b""


class _Rhythm(NamedTuple):
    """See `Exchange.keep_alive`."""

    every_s: float
    beat: Callable[[], bytes]
    opens_in: Callable[[], float]
