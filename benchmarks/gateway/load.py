"""A closed loop of HTTP/1.1 requests over kept-alive connections, light enough to outrun the servers it measures."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timings:
    """Seconds, one entry a request."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """From the request to the first event of content."""
    last_body: bytes = b""
    elapsed: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.whole) / self.elapsed


def request(path: str, body: bytes, key: str = "") -> bytes:
    """The bytes of a POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def drive(port: int, requests: list[bytes], *, concurrency: int, marks: bytes = b"") -> Timings:
    """Send every request once, `concurrency` at a time. `marks` is what the first event of content contains.

    Raises:
        RuntimeError: A reply was not 200, or a connection was lost.
    """
    timings, loop = Timings(), asyncio.get_running_loop()
    left = iter(requests)
    connections = []
    for _ in range(concurrency):
        done: asyncio.Future[None] = loop.create_future()
        await loop.create_connection(lambda done=done: _Client(left, timings, done, marks), "127.0.0.1", port)
        connections.append(done)
    started = time.perf_counter()
    await asyncio.gather(*connections)
    timings.elapsed = time.perf_counter() - started
    return timings


class _Client(asyncio.Protocol):
    """One connection: the next request goes out when the reply to the last is whole."""

    def __init__(self, left: Iterator[bytes], timings: Timings, done: asyncio.Future[None], marks: bytes) -> None:
        self._left, self._timings, self._done, self._marks = left, timings, done, marks
        self._reply = bytearray()
        self._sent_at = 0.0
        self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._reply += data
        if not self._first_at and self._marks in self._reply:
            self._first_at = now
        if self._is_whole():
            if not self._reply.startswith(b"HTTP/1.1 200"):
                self._done.set_exception(RuntimeError(bytes(self._reply[:500]).decode(errors="replace")))
                return
            self._timings.whole.append(now - self._sent_at)
            self._timings.first.append(self._first_at - self._sent_at)
            self._timings.last_body = bytes(self._reply).partition(b"\r\n\r\n")[2]
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"the connection was lost: {exc}"))

    def _next(self) -> None:
        data = next(self._left, None)
        if data is None:
            self._done.set_result(None)
            self._transport.close()
            return
        self._reply.clear()
        self._first_at = 0.0
        self._sent_at = time.perf_counter()
        self._transport.write(data)

    def _is_whole(self) -> bool:
        end = self._reply.find(b"\r\n\r\n")
        if end < 0:
            return False
        at = self._reply.find(b"content-length: ", 0, end)
        if at < 0:
            return self._reply.endswith(b"\r\n0\r\n\r\n")
        length = int(self._reply[at + 16 : self._reply.find(b"\r\n", at)])
        return len(self._reply) >= end + 4 + length
