"""A TCP proxy between workers and server that cuts connections: before a request, after it, or amid the answer."""

import asyncio
import contextlib
import random
import socket
from pathlib import Path

import uvloop

from integration_tests.simulation.parent import end_with_parent

CUT_EVERY = 250
"""One chunk of data in so many is the last of its connection."""
_CHUNK = 64 * 1024


def run_proxy(sock: socket.socket, target: int, seed: int, log: Path) -> None:
    """Listen on `sock`, forward to port `target` of this machine, until killed; cuts are written to `log`."""
    end_with_parent()
    uvloop.run(_Proxy(target, seed, log).serve(sock))


class _Proxy:
    def __init__(self, target: int, seed: int, log: Path) -> None:
        self._target, self._log = target, log
        self._rng = random.Random(f"{seed}/proxy")

    async def serve(self, sock: socket.socket) -> None:
        server = await asyncio.start_server(self._connection, sock=sock, backlog=1024)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is being started
            writer.transport.abort()
            return
        forth = asyncio.create_task(self._pump(reader, upstream[1], "request"))
        back = asyncio.create_task(self._pump(upstream[0], writer, "answer"))
        await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
        for task in (forth, back):
            task.cancel()
        await asyncio.gather(forth, back, return_exceptions=True)
        for end in (writer, upstream[1]):
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._rng.randrange(CUT_EVERY) == 0:
                    await self._cut(data, writer, what)
                    return
                writer.write(data)
                await writer.drain()

    async def _cut(self, data: bytes, writer: asyncio.StreamWriter, what: str) -> None:
        """A request goes whole before the end, in part or not at all; an answer in part, or not at all."""
        sent = self._rng.choice((0, len(data) // 2, len(data)) if what == "request" else (0, len(data) // 2))
        with self._log.open("a") as log:
            log.write(f"{what} {sent}/{len(data)}\n")
        writer.write(data[:sent])
        await writer.drain()
        if sent:
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))  # so that it arrives before the end does
        writer.transport.abort()
