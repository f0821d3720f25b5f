"""A minimal HTTP/1.1 server on loopback: enough for the JSON and event streams of the scripted servers."""

import abc
import asyncio
from collections.abc import AsyncIterator
from typing import Self

import msgspec


class Request(msgspec.Struct, frozen=True):
    """One request; header names are lower case, the query string is dropped."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: `body`, or, where `chunks` is given, a stream of them."""

    status: int = 200
    headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    body: bytes = b""
    chunks: AsyncIterator[bytes] | None = None


class LoopbackServer(abc.ABC):
    """Serves `handle` while it is entered as an async context manager, on a port that the system chooses."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        if self._server is None:
            raise RuntimeError("the server is not running: enter it with `async with`")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @abc.abstractmethod
    async def handle(self, request: Request) -> Response | None:
        """Answer one request; None cuts the connection. Cancelled when the client goes away."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead = b""
        try:
            while True:
                request = await _read_request(reader, ahead)
                handling = asyncio.create_task(self.handle(request))
                peeking = asyncio.create_task(reader.read(1))
                try:
                    await asyncio.wait({handling, peeking}, return_when=asyncio.FIRST_COMPLETED)
                    if not handling.done() and not await peeking:
                        return  # the client is gone
                    response = await handling
                    if response is None:
                        return
                    await _write_response(writer, response)
                    ahead = await peeking
                finally:
                    handling.cancel()
                    peeking.cancel()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client is gone
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader, ahead: bytes) -> Request:
    head = (ahead + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *header_lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = request_line.split(" ", 2)
    headers: dict[str, str] = {}
    for line in header_lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method=method, path=target.partition("?")[0], headers=headers, body=body)


async def _write_response(writer: asyncio.StreamWriter, response: Response) -> None:
    headers = {"content-type": "application/json", **response.headers}
    if response.chunks is None:
        headers["content-length"] = str(len(response.body))
    else:
        headers["transfer-encoding"] = "chunked"
    lines = [f"HTTP/1.1 {response.status} ", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + response.body)
    await writer.drain()
    if response.chunks is not None:
        async for chunk in response.chunks:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
