"""A client that is only a socket, so that a test can break it off where it wants."""

import asyncio
import json
import socket
import struct
from typing import Any

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class RawClient:
    """One request over a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def post(cls, caller: Any, path: str, body: dict[str, Any], **headers: str) -> "RawClient":
        host, port = caller.url.removeprefix("http://").partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body).encode()
        head = {"host": "x", "authorization": f"Bearer {caller.key}", "content-length": str(len(content)), **headers}
        target = "/" + caller.url.removeprefix("http://").partition("/")[2] + path
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        return cls(reader, writer)

    async def read_until(self, mark: bytes) -> bytes:
        return await self._reader.readuntil(mark)

    def close(self) -> None:
        """End the connection as a client does that wants no more of it."""
        self._writer.close()

    def reset(self) -> None:
        """Break the connection: the server's next read or write of it fails."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._writer.transport.abort()
