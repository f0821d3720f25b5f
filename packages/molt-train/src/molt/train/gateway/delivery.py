"""Handing one reply to one client, whole or streamed, and knowing whether the client has it."""

import asyncio
from collections.abc import Sequence

from molt.train.gateway.attempts import Sample, step_so_far
from molt.train.gateway.call import Dialect, Reply, ReplyEncoder, Step
from molt.train.gateway.exchange import Exchange
from molt.train.gateway.turns import TurnNode, TurnTree
from molt.train.records.turn import TurnStatus

FIRST_BYTE_S = 1.0
"""Of sampling, after which a stream without a token is opened all the same: clients take one without a byte for dead,
and send again. What an engine refuses, it refuses sooner, so that a refusal keeps its status."""


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
        exchange.failure = encoder.failure
        self._has_begun = False
        self._unsent = b""

    def keep_alive(self, every_s: float) -> None:
        """Break silences of a stream longer than `every_s` seconds. A whole reply has no place for signs of life."""
        if self._stream:
            self._exchange.keep_alive(every_s, self._beat, self._opens_in)

    def begin(self, samples: Sequence[Sample]) -> None:
        """Sampling begins; one sample a choice."""
        self.replies = [sample.reply for sample in samples]
        self._samples, self._began_at = samples, asyncio.get_running_loop().time()

    async def step(self, step: Step, *, is_last: bool = False) -> None:
        """Send what was sampled. The last step is kept for `finish`, which sends both in one write."""
        if not self._stream or self._exchange.gone:
            return
        self._unsent += self._opening() + self._encoder.step(step)
        if self._unsent and not is_last:
            data, self._unsent = self._unsent, b""
            await self._exchange.write(data)

    async def all_of(self, replies: Sequence[Reply], nodes: Sequence[TurnNode] = ()) -> bool:
        """Send replies that are whole. See `finish`."""
        self._exchange.watch()
        self.replies = replies
        for reply in replies:
            if reply.token_ids:
                await self.step(step_so_far(reply), is_last=True)
        return await self.finish(nodes)

    async def finish(self, nodes: Sequence[TurnNode]) -> bool:
        """Send the end of the reply. The turns in `nodes` are delivered once the socket has taken it unbroken.

        Returns:
            Whether the client has the reply, as far as the socket knows.
        """
        exchange = self._exchange
        if exchange.gone:
            return False
        if self._stream:
            await exchange.write_last(self._unsent + self._opening() + self._encoder.finish(self.replies))
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
