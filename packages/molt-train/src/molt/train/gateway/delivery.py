"""Handing one reply to one client, whole or streamed, and knowing whether the client has it."""

import asyncio
from collections.abc import Awaitable, Sequence

from molt.train.gateway.attempts import Sample, step_so_far
from molt.train.gateway.call import Dialect, Reply, ReplyEncoder, Step
from molt.train.gateway.call_error import CallError
from molt.train.gateway.exchange import Exchange
from molt.train.gateway.turns import TurnNode, TurnTree
from molt.train.records.turn import TurnStatus

FIRST_BYTE_S = 1.0
"""Of sampling, after which a stream without a token is opened all the same: clients take one without a byte for dead,
and send again. What an engine refuses, it refuses sooner, so that a refusal keeps its status."""

GATHER_S = 0.01
"""Between two writes of a stream. Tokens that an engine samples faster than this go out together: nobody reads them one
by one, and a write costs more than all else that is done for a token."""


class Delivery:
    """One reply on its way to a client. A client that has gone is sent nothing, and nothing fails."""

    def __init__(
        self, exchange: Exchange, encoder: ReplyEncoder, dialect: Dialect, *, stream: bool, tree: TurnTree
    ) -> None:
        """Take where the reply goes, and the tree of the turns that are handed over with it."""
        self.replies: Sequence[Reply] = ()
        """The choices, growing."""
        self._samples: Sequence[Sample] = ()
        self._began_at = 0.0
        self._exchange, self._encoder, self._stream = exchange, encoder, stream
        self._tree, self._early_keepalive = tree, dialect.keepalive
        exchange.failure = self._failure
        self._has_begun = False
        self._unsent = b""
        self._due = 0.0
        """When the next events may be written, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None

    def keep_alive(self, every_s: float) -> None:
        """Break silences of a stream longer than `every_s` seconds. A whole reply has no place for signs of life."""
        if self._stream:
            self._exchange.keep_alive(every_s, self._beat, self._opens_in)

    def begin(self, samples: Sequence[Sample]) -> None:
        """Sampling begins; one sample a choice."""
        self.replies = [sample.reply for sample in samples]
        self._samples, self._began_at = samples, asyncio.get_running_loop().time()

    def step(self, step: Step) -> Awaitable[None] | None:
        """Send what was sampled, at the latest `GATHER_S` after the last write.

        Once every sample is recorded, all is kept for `finish`, which sends it with the end in one write.

        Returns:
            What is to be awaited; None where nothing is.
        """
        if not self._stream or self._exchange.gone:
            return None
        if not self._has_begun:
            self._unsent += self._opening()
        self._unsent += self._encoder.step(step)
        if self._timer or not self._unsent or None not in [sample.node for sample in self._samples]:
            return None
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            return self._flush()
        self._timer = loop.call_at(self._due, self._flush_now)
        return None

    async def all_of(self, replies: Sequence[Reply], nodes: Sequence[TurnNode] = ()) -> bool:
        """Send replies that are whole. See `finish`."""
        self._exchange.watch()
        self.replies = replies
        for reply in replies:
            if reply.token_ids:
                self.step(step_so_far(reply))
        return await self.finish(nodes)

    async def finish(self, nodes: Sequence[TurnNode]) -> bool:
        """Send the end of the reply. The turns in `nodes` are delivered once the socket has taken it unbroken.

        Returns:
            Whether the client has the reply, as far as the socket knows.
        """
        exchange = self._exchange
        self._stop_timer()
        if exchange.gone:
            return False
        if self._stream:
            data, self._unsent = self._unsent, b""  # a flush that is under way finds nothing more to send
            await exchange.write_last(data + self._opening() + self._encoder.finish(self.replies))
        else:
            await exchange.write_whole(self._encoder.whole(self.replies))
        delivered = not exchange.lost
        if delivered:
            # The client may act on the reply from now on, so it counts as delivered unless it proves to be reset.
            before: list[TurnStatus] = [node.status for node in nodes]
            for node in nodes:
                self._tree.mark(node, "delivered")
            await exchange.settle()
            delivered = not exchange.broken
            if not delivered:
                for node, status in zip(nodes, before, strict=True):
                    self._tree.mark(node, "delivered" if node.continued else status)
        await exchange.end()
        return delivered

    async def _flush(self) -> None:
        self._stop_timer()
        data, self._unsent = self._unsent, b""
        self._due = asyncio.get_running_loop().time() + GATHER_S
        if data:  # else the end was written before this task came to its turn
            await self._exchange.write(data)

    def _flush_now(self) -> None:
        self._timer = None
        if self._unsent and not self._exchange.gone:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _failure(self, error: CallError, request_id: str) -> bytes:
        """The last events of a stream that ends in an error, behind those that were not sent yet."""
        self._stop_timer()
        data, self._unsent = self._unsent, b""
        return data + self._encoder.failure(error, request_id)

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._encoder.start(self.replies)

    def _opens_in(self) -> float:
        """Seconds after which the stream is to be opened. A call that may still be refused keeps its status line."""
        if not self._samples or any(sample.is_held for sample in self._samples):
            return FIRST_BYTE_S
        return self._began_at + FIRST_BYTE_S - asyncio.get_running_loop().time()

    def _beat(self) -> bytes:
        if not self.replies:
            return self._early_keepalive
        data, self._unsent = self._unsent, b""
        return data + (self._encoder.keepalive() if self._has_begun else self._opening())
