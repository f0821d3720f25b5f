"""Resends: which requests are answered by the sample that an earlier request asked for.

An attempt is one request on its way: received, sampling, sampled, then delivered, undelivered, aborted or failed.
Clients resend when a stream breaks, and nothing in a resend can be trusted to say so: some count their retries, some
send the same bytes again, some change their metadata. What decides is delivery. A reply that was sampled but not handed
over is owed to whoever asks the same again; one that was handed over is not, and the same request is a new sample.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from molt.train.gateway.call import (
    Content,
    Event,
    Reasoning,
    Reply,
    Step,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from molt.train.gateway.call_error import CallError
from molt.train.gateway.exchange import Exchange
from molt.train.gateway.turns import TurnNode, unpack, unpack_floats

_decode_replies = msgspec.msgpack.Decoder(list[Reply]).decode


class Sample(Protocol):
    """One generation on its way."""

    reply: Reply
    node: TurnNode | None
    """Its turn, once it is recorded."""
    is_held: bool
    """The engine was dead, and has not sampled since."""

    async def abort(self) -> None:
        """Have it end soon."""
        ...


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What tells a resend from another request."""

    key: bytes
    """Digest of the request's normal form."""
    is_retry: bool = False
    """The client says that it has sent this before."""
    name: str = ""
    """The client's `Idempotency-Key`."""


class Answered(msgspec.Struct, frozen=True, gc=False):
    """What a request was answered. The tokens stay in the turns; this is what they say."""

    nodes: tuple[TurnNode, ...]
    packed: bytes
    at: float
    """Seconds on the monotonic clock."""

    @property
    def delivered(self) -> bool:
        """Whether a client has it."""
        return all(node.status == "delivered" for node in self.nodes)

    def replies(self) -> list[Reply]:
        """The replies again, with the ids they had."""
        replies = _decode_replies(self.packed)
        for reply, node in zip(replies, self.nodes, strict=True):
            reply.token_ids, reply.logprobs = unpack(node.token_ids), unpack_floats(node.logprobs)
        return replies


class Attempt:
    """One request on its way, and the clients that wait for its reply."""

    def __init__(self, asked: Asked, grace_s: float, counters: Counter[str]) -> None:
        self.asked = asked
        self.runs: Sequence[Sample] = ()
        """The samples, once there are any: one a choice."""
        self.has_resend = False
        """The same request came again while the client seemed to be there."""
        self.is_given_up = False
        """Nobody waits any more: its generations were told to stop."""
        self._grace_s, self._counters = grace_s, counters
        self._clients: set[Exchange] = set()
        self._followers: list[asyncio.Queue[Step | CallError | None]] = []
        self._grace: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def replies(self) -> list[Reply]:
        """The replies so far, one a choice; none before sampling begins."""
        return [run.reply for run in self.runs]

    @property
    def nodes(self) -> tuple[TurnNode, ...]:
        """The recorded turns."""
        return tuple([run.node for run in self.runs if run.node])

    @property
    def is_followed(self) -> bool:
        """Whether others than its first client were promised the reply."""
        return bool(self._followers)

    @property
    def is_abandoned(self) -> bool:
        """Whether all its clients are gone, while it may still be taken over."""
        return not self._clients and not self.is_given_up and not self._is_over

    def join(self, exchange: Exchange) -> None:
        """A client waits for the reply; `exchange` is watched from now on."""
        self._clients.add(exchange)
        if self._grace:
            self._grace.cancel()
            self._grace = None
        exchange.watch(lambda: self._leave(exchange))

    def publish(self, step: Step) -> None:
        """Pass on what was sampled to the clients that joined later."""
        for follower in self._followers:
            follower.put_nowait(step)

    def end(self, error: CallError | None = None) -> None:
        """Nothing more comes. Only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        if self._grace:
            self._grace.cancel()
        for follower in self._followers:
            follower.put_nowait(error)

    async def follow(self) -> AsyncGenerator[Step]:
        """What was sampled before, in one step a choice, then what is sampled, as it comes.

        Raises:
            CallError: The attempt failed or was aborted.
        """
        steps: asyncio.Queue[Step | CallError | None] = asyncio.Queue()
        for reply in self.replies:
            if reply.token_ids:
                steps.put_nowait(step_so_far(reply))
        self._followers.append(steps)
        while (step := await steps.get()) is not None:
            if isinstance(step, CallError):
                raise step
            yield step

    def _leave(self, exchange: Exchange) -> None:
        self._clients.discard(exchange)
        self._counters["clients_left"] += 1
        if self._clients or self._is_over or self.is_given_up:
            return
        if self.has_resend and not exchange.streaming:
            self._counters["resends.superseded"] += 1
            self._give_up()
        else:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        self.is_given_up = True
        self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        for run in self.runs:
            await run.abort()


class Attempts:
    """The requests of one session, by their normal form."""

    def __init__(self, counters: Counter[str]) -> None:
        """Take the counters of the session."""
        self._counters = counters
        self._latest: dict[bytes, Attempt | Answered] = {}
        self._named: dict[str, tuple[bytes, Attempt | Answered | None]] = {}
        self._under_way: set[Attempt] = set()
        self._owed: Counter[bytes] = Counter()
        """Requests that got no reply: so many resends are owed a sample, whoever was answered the same meanwhile."""
        self._is_sealed = False

    def find(self, asked: Asked, *, replay_s: float) -> Attempt | Answered | None:
        """The attempt that answers a request; None where it is a sample of its own.

        Args:
            asked: The request.
            replay_s: How long a reply that was not handed over is kept for a resend, in seconds.

        Raises:
            CallError: Its idempotency key was used for another request.
        """
        key, found = self._named.get(asked.name, (asked.key, None))
        if key != asked.key:
            message = f"idempotency-key {asked.name[:64]!r} was sent with another body: send a new key with a new body"
            raise CallError("invalid_request", message)
        if found is None or (isinstance(found, Attempt) and found.is_given_up):
            found = self._of_key(asked, replay_s)
        if found is not None:
            self._counters["resends.attached" if isinstance(found, Attempt) else "resends.replayed"] += 1
        return found

    def begin(self, asked: Asked, *, grace_s: float) -> Attempt:
        """A request that is to be sampled. `grace_s` is how long it goes on without a client, in seconds."""
        attempt = Attempt(asked, grace_s, self._counters)
        owed = self._owed.get(asked.key, 0)
        if owed > 1:
            self._owed[asked.key] = owed - 1
        elif owed:
            del self._owed[asked.key]
        self._under_way.add(attempt)
        self._latest[asked.key] = attempt
        if asked.name:
            self._named[asked.name] = asked.key, attempt
        return attempt

    def settle(self, attempt: Attempt) -> None:
        """The attempt is over; its reply, where there is one, was handed over or is kept for a resend."""
        self._under_way.discard(attempt)
        asked, nodes, answered = attempt.asked, attempt.nodes, None
        if nodes and all(node.status in ("delivered", "undelivered") for node in nodes):
            answered = Answered(nodes, _pack(attempt.replies), time.monotonic())
        elif attempt.is_given_up:
            self._counters["attempts.given_up"] += 1
        elif attempt.runs:
            self._counters["attempts.unanswered"] += 1
        if self._is_sealed:
            return
        if asked.name:
            self._named[asked.name] = asked.key, answered
        if answered is None:
            self._owed[asked.key] += 1
        if self._latest.get(asked.key) is attempt:
            if answered is None:
                del self._latest[asked.key]
            else:
                self._latest[asked.key] = answered

    def seal(self) -> None:
        """Forget everything: no request comes any more."""
        self._is_sealed = True
        for requests in (self._latest, self._named, self._owed):
            requests.clear()

    def _of_key(self, asked: Asked, replay_s: float) -> Attempt | Answered | None:
        latest = self._latest.get(asked.key)
        if latest is None:
            return None
        same = [attempt for attempt in self._under_way if attempt.asked.key == asked.key]
        for attempt in same:
            if attempt.is_abandoned:
                return attempt
        for attempt in same:
            attempt.has_resend = True
        if isinstance(latest, Attempt):
            return None
        if latest.delivered:
            return latest if asked.is_retry and not self._owed[asked.key] else None
        return latest if asked.is_retry or time.monotonic() - latest.at <= replay_s else None


def step_so_far(reply: Reply) -> Step:
    """All that a reply says so far, as one step."""
    events: list[Event] = []
    if reply.reasoning:
        events.append(Reasoning(reply.reasoning))
    if reply.content:
        events.append(Content(reply.content))
    for call in reply.calls:
        events.append(ToolCallStart(call.name, call.call_id))
        if call.arguments:
            events.append(ToolCallArguments(call.arguments))
        if call.complete:
            events.append(ToolCallEnd())
    return Step(events, list(reply.token_ids), list(reply.logprobs), list(reply.top_logprobs), reply.choice)


def _pack(replies: Sequence[Reply]) -> bytes:
    return msgspec.msgpack.encode([msgspec.structs.replace(reply, token_ids=[], logprobs=[]) for reply in replies])
