"""The floor: a bare ASGI application on the same server that reads a request and returns bytes it was given.

`python -m benchmarks.gateway.floor REPLY.json`, with `{"whole": body, "events": [event, ...]}` in the file: a request
whose body asks for a stream is sent the events one by one. Prints its origin as the gateway does.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn

from molt.train.server.listen import bind, origin


def application(reply: dict[str, Any]) -> Any:
    """The application that returns `reply`."""
    whole, events = reply["whole"].encode(), [event.encode() for event in reply["events"]]
    length = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(whole))]

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if b'"stream":true' in body:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": whole})

    return app


def main() -> None:
    """Serve until killed."""
    sock = bind("127.0.0.1", 0, token="")
    sock.listen(1024)
    print(json.dumps({"url": origin(sock)}), flush=True)
    app = application(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    config = uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_level="error", server_header=False)
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()
