"""Stage 2, session: credentials, sampling and turn tree of one rollout's model calls."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, Protocol

from molt.agents.protocol import SamplingParams
from molt.train.gateway.attempts import Attempts
from molt.train.gateway.past import Past
from molt.train.gateway.trace import Trace, TraceLog
from molt.train.gateway.turns import TurnTree
from molt.train.records.turn import Turn

SamplingPolicy = Literal["enforce", "default", "client"]

CLOSE_LIMIT_S = 10.0
"""How long a closing session waits for its aborted generations to be recorded."""
REPORTED = "its result was reported"
"""Why a session is closed, where nothing else is said."""


class Abortable(Protocol):
    """A generation in flight."""

    async def abort(self) -> None:
        """Have it end soon, recorded as aborted."""
        ...


class Session:
    """The model calls of one rollout: who may make them, how they sample, and what was recorded."""

    def __init__(
        self,
        session_id: str,
        *,
        key_digest: bytes,
        sampling: SamplingParams,
        policy: SamplingPolicy,
        expected_sampling: SamplingParams,
        metadata: dict[str, Any],
        trace: Trace | None = None,
    ) -> None:
        self.session_id = session_id
        self.trace = trace
        """Where its turns are kept until the ledger has the recording; None: nowhere."""
        self.state: Literal["open", "closed"] = "open"
        self.closed_because = REPORTED
        """What a call is told, once it is closed."""
        self.sampling = sampling
        self.policy: SamplingPolicy = policy
        self.expected_sampling = expected_sampling
        """What the loss takes the turns to be sampled with; those sampled otherwise are flagged as off-policy."""
        self.metadata = metadata
        self.counters: Counter[str] = Counter()
        """Everything forked, dropped, clamped or ignored, under a named reason."""
        self.tree = TurnTree(trace)
        self.attempts = Attempts(self.counters)
        self.slots: asyncio.Semaphore | None = None
        """Bounds the requests at once; made by the gateway, which knows the bound."""
        self._key_digest = key_digest
        self.clock: Callable[[], float] = time.monotonic
        """Seconds that never go back."""
        self.last_call = 0.0
        """When a model call began or ended last, or the session was opened, on the clock."""
        self._past: Past | None = None
        self._running: set[Abortable] = set()
        self._idle: asyncio.Event | None = None

    @property
    def past(self) -> Past:
        """The responses that later requests can name."""
        if self._past is None:
            self._past = Past()
        return self._past

    def turns(self) -> list[Turn]:
        """Every model call so far, in order of completion."""
        return self.tree.turns(self.session_id)

    def accepts(self, key: str) -> bool:
        """Whether `key` is this session's, in constant time."""
        return hmac.compare_digest(_digest(key), self._key_digest)

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] += value

    def begun(self, generation: Abortable) -> None:
        """A generation runs: closing the session aborts it."""
        self._running.add(generation)
        self.last_call = self.clock()

    def ended(self, generation: Abortable) -> None:
        """It is recorded."""
        self._running.discard(generation)
        self.last_call = self.clock()
        if self._idle and not self._running:
            self._idle.set()

    def quiet_s(self) -> float:
        """Seconds since the last model call ended, or since the session was opened; 0 while one runs."""
        return 0.0 if self._running else self.clock() - self.last_call

    async def close(self) -> None:
        """Refuse further calls, abort those in flight, and wait until they are recorded.

        Raises:
            TimeoutError: A generation did not end within `CLOSE_LIMIT_S`.
        """
        self.state = "closed"
        if self._running:
            self._idle = asyncio.Event()
            await asyncio.gather(*(generation.abort() for generation in tuple(self._running)))
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._idle.wait()
        self.attempts.seal()
        self.tree.seal()
        self._past = None

    def release(self) -> None:
        """Forget what a closed session recorded, in memory and in its trace: somebody else has it."""
        if self.trace is not None:
            self.trace.discard()
            self.trace = None
        self.tree, self.counters, self.metadata, self._past = TurnTree(), Counter(), {}, None
        self.attempts = Attempts(self.counters)
        self.attempts.seal()


class Sessions:
    """The sessions in memory. With `traces` every turn is kept there, too.

    `clock` gives seconds and must never go back.
    """

    def __init__(self, traces: TraceLog | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._traces = traces
        self.clock = clock
        self._sessions: dict[str, Session] = {}

    def open(
        self,
        *,
        sampling: SamplingParams,
        policy: SamplingPolicy,
        expected_sampling: SamplingParams | None = None,
        metadata: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> tuple[Session, str]:
        """Open a session.

        Args:
            sampling: Its parameters.
            policy: Whose parameters apply; see `effective_sampling`.
            expected_sampling: What the loss takes its turns to be sampled with; None: `sampling`.
            metadata: Whose session it is.
            seed: What the sampling seeds of its calls are made of; None: the engine draws as it likes.

        Returns:
            The session, and its API key in plain text, which is kept nowhere.
        """
        # Hexadecimal: what begins with "-" is taken for an option on the command line of an agent.
        key, session_id = secrets.token_hex(24), secrets.token_hex(24)
        session = Session(
            session_id,
            key_digest=_digest(key),
            sampling=sampling,
            policy=policy,
            expected_sampling=expected_sampling or sampling,
            metadata=metadata or {},
            trace=self._traces.of(session_id) if self._traces else None,
        )
        session.tree.seed = seed
        session.clock, session.last_call = self.clock, self.clock()
        self._sessions[session.session_id] = session
        return session, key

    def get(self, session_id: str) -> Session | None:
        """The session, open or closed; None where it is unknown."""
        return self._sessions.get(session_id)

    async def close(self, session_id: str, reason: str | None = None) -> Session:
        """End a session: later model calls get 410, those in flight are aborted. A closed session stays closed.

        Args:
            session_id: The session.
            reason: What those calls are told; None: that its result was reported.

        Raises:
            KeyError: The session is unknown.
            TimeoutError: A generation did not end within `CLOSE_LIMIT_S`; the session is closed all the same.
        """
        session = self._sessions[session_id]
        session.closed_because = reason or REPORTED
        await session.close()
        return session

    def release(self, session_id: str) -> None:
        """Keep of a closed session only what refuses later calls."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.release()

    def forget(self, session_id: str) -> None:
        """Drop a session from memory, if it is there; it is unknown afterwards."""
        self._sessions.pop(session_id, None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
