"""A response whose sender wants to know when it did not arrive."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from molt.train.gateway.exchange import CONNECTION, Connection


class HandedOver(Response):
    """A JSON response. `lost` is called when its connection breaks before the client has taken all of it.

    That is known for as long as nothing else is watched on the connection: what it is told of later may have arrived
    after all, if the client read it and was then cut off, so `lost` must not undo what the client has confirmed since.
    A connection that its client closes in good order has delivered what was sent.
    """

    media_type = "application/json"

    def __init__(self, content: bytes, *, lost: Callable[[], None]) -> None:
        super().__init__(content)
        self._lost = lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        if connection is None:  # a server that cannot tell
            await super().__call__(scope, receive, send)
            return
        has_begun = False

        def on_lost() -> None:
            if not (has_begun and connection.closed_in_order()):
                self._lost()

        connection.watch(on_lost)
        has_begun = not connection.closed_in_order()
        await super().__call__(scope, receive, send)
