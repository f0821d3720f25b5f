"""Sessions that no worker drives: an agent of somebody's opens one, calls the model, and says how it went, some time.

    open --- result -----------------------------------------> closed
      |                                                          ^
      +-- pool.session_idle_s without a call --> idle -- result -+
      |                                            |
      +-- the server ends ------------------------>+-- pool.reward_wait_s --> expired

An idle session takes no model calls, and what it recorded is in the ledger. Its result may come to another server than
opened it; the time that it has for that begins anew then, since clocks say nothing across processes.
"""

import logging
import time
from heapq import heappop, heappush

import msgspec

from molt.agents.protocol import ResultReply, SamplingParams, SessionReply, SessionRequest, SessionResult
from molt.train.controller.desk.sessions import DeskSessions
from molt.train.controller.desk.settings import DeskSettings
from molt.train.controller.results import outcome_of
from molt.train.errors import LedgerFullError, PayloadDamagedError
from molt.train.gateway.sessions import Sessions
from molt.train.pool.pool import Pool
from molt.train.pool.rows import SessionRow
from molt.train.records.recording import Recording
from molt.train.records.rollout import Outcome, Task
from molt.train.server import ApiError, no_room

DAMAGED = "recording_damaged"
"""Counter of a recording that the ledger cannot read any more."""

log = logging.getLogger(__name__)


class SelfDrivenStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions that no worker drives, at a glance."""

    open: int
    idle: int
    """They take no model calls any more, and wait for their results."""
    closed: int
    """Results taken since the server started."""
    expired: int
    """Since then."""


class SelfDriven:
    """Takes the sessions up that the last server left without a result."""

    def __init__(self, pool: Pool, sessions: DeskSessions, gateway: Sessions, settings: DeskSettings) -> None:
        self._pool, self._sessions, self._settings = pool, sessions, settings
        self._clock = gateway.clock
        self._open: set[str] = set()
        self._looks: list[tuple[float, str]] = []
        """A heap: when each open session can be idle at the earliest, on the clock. Thousands are open, so that looking
        at each of them each second would cost more than it finds; some here have got their results meanwhile."""
        self._idle: dict[str, float] = {}
        """When each was called last, on the clock."""
        self.num_results = 0
        for row in pool.ledger.open_sessions():
            if row.state == "open":
                pool.ledger.move_session(row.session_id, "idle")
            self._idle[row.session_id] = self._clock()

    def open(self, request: SessionRequest) -> SessionReply:
        """See `RolloutDesk.open_session`."""
        settings = self._settings
        sampling = request.sampling_params or settings.sampling_params
        _check_sampling(sampling)
        if not self._pool.ledger.has_room():
            raise no_room("no sessions are opened")
        credentials = self._sessions.open(
            sampling,
            request.sampling_policy or settings.sampling_policy,
            expected=settings.sampling_params,
            metadata=request.metadata,
        )
        session_id, group = credentials.session_id, request.group
        task = None if group is None and request.task is None else Task(task_id=group or "", data=request.task or {})
        row = SessionRow(session_id=session_id, group=group, task=task, metadata=request.metadata, opened=time.time())
        try:
            self._pool.ledger.add_session(row)
        except LedgerFullError:
            self._sessions.unopen(session_id)
            raise
        self._open.add(session_id)
        self._look_in(settings.session_idle_s, session_id)
        return SessionReply(**msgspec.structs.asdict(credentials))

    async def finish(self, session_id: str, result: SessionResult) -> ResultReply:
        """See `RolloutDesk.finish_session`."""
        if not self._awaits(session_id):
            return self._refuse(session_id)
        recording = await self._sessions.record(session_id)
        row = self._pool.ledger.session(session_id)
        if row is None or not self._awaits(session_id):  # another result was faster
            return self._refuse(session_id)
        self.num_results += 1
        outcome, reason = outcome_of(result), None
        if recording is None:
            recording = self._recorded(session_id)
            if DAMAGED in recording.counters:
                outcome = Outcome(kind="infrastructure", error="what the session recorded is damaged")
        if row.group is None or row.task is None:
            self._pool.keep_session(recording, outcome, "closed")
        else:
            size = self._settings.group_size
            verdict = self._pool.collect(row.group, task=row.task, size=size, outcome=outcome, recording=recording)
            reason = verdict.reason
        self._pool.counters["sessions_closed"] += 1
        self._forget(session_id)
        return ResultReply(accepted=True, reason=reason)

    async def expire(self) -> None:
        """Close the sessions that are not called any more, and give those up whose results did not come."""
        now, limit = self._clock(), self._settings.session_idle_s
        while self._looks and self._looks[0][0] <= now:
            _, session_id = heappop(self._looks)
            quiet = self._quiet_s(session_id)
            if quiet >= limit:
                try:
                    await self._rest(session_id, f"it was not called for {limit:g} s")
                except LedgerFullError:
                    self._look_in(0.0, session_id)
                    raise
            elif session_id in self._open:
                self._look_in(limit - quiet, session_id)
        for session_id, last_call in list(self._idle.items()):
            if now - last_call >= self._settings.reward_wait_s:
                self._give_up(session_id)

    async def close(self) -> None:
        """Take no more model calls; the results may come to the next server."""
        for session_id in list(self._open):
            try:
                await self._rest(session_id, "the server has stopped")
            except LedgerFullError as error:
                log.warning("session %s: what it recorded stays in its trace: %s", session_id, error)

    def status(self) -> SelfDrivenStatus:
        """At a glance."""
        counters = self._pool.counters
        return SelfDrivenStatus(
            open=len(self._open),
            idle=len(self._idle),
            closed=counters["sessions_closed"],
            expired=counters["sessions_expired"],
        )

    def _look_in(self, seconds: float, session_id: str) -> None:
        heappush(self._looks, (self._clock() + seconds, session_id))

    def _quiet_s(self, session_id: str) -> float:
        """Seconds since the last model call of a session; 0 while one runs, or where the session is over."""
        session = self._sessions.get(session_id)
        return session.quiet_s() if session else 0.0

    def _awaits(self, session_id: str) -> bool:
        return session_id in self._open or session_id in self._idle

    def _forget(self, session_id: str) -> None:
        self._open.discard(session_id)
        self._idle.pop(session_id, None)
        self._sessions.kept(session_id)

    async def _rest(self, session_id: str, reason: str) -> None:
        """Close a session, and keep what it recorded."""
        last_call = self._clock() - self._quiet_s(session_id)
        recording = await self._sessions.record(session_id, reason)
        if recording is None or session_id not in self._open:  # its result came meanwhile
            return
        self._pool.keep_session(recording, None, "idle")
        self._pool.counters["sessions_idle"] += 1
        self._forget(session_id)
        self._idle[session_id] = last_call

    def _give_up(self, session_id: str) -> None:
        error = f"no result within {self._settings.reward_wait_s:g} s of the last model call (pool.reward_wait_s)"
        log.warning("session %s: %s", session_id, error)
        outcome = Outcome(kind="infrastructure", error=error)
        self._pool.keep_session(self._recorded(session_id), outcome, "expired")
        self._pool.counters["sessions_expired"] += 1
        self._forget(session_id)

    def _recorded(self, session_id: str) -> Recording:
        """What an idle session recorded; one that no call was made in, when the server died, has nothing."""
        counters: dict[str, int] = {}
        try:
            recording = self._pool.ledger.recording(session_id)
        except PayloadDamagedError as error:
            log.warning("session %s: %s", session_id, error)
            recording, counters = None, {DAMAGED: 1}
        return recording or Recording(session_id=session_id, state="closed", turns=[], segments=[], counters=counters)

    def _refuse(self, session_id: str) -> ResultReply:
        row = self._pool.ledger.session(session_id)
        if row is None:
            self._sessions.recording(session_id)  # of an unknown one there is none
            reason = "the session belongs to a lease, and its worker reports the result"
        elif row.state == "expired":
            reason = f"the session has expired: no result came within {self._settings.reward_wait_s:g} s"
        else:
            reason = "the session has its result already"
        log.info("%s: refused, %s", session_id, reason)
        is_repeated = row is not None and row.state == "closed"
        return ResultReply(accepted=False, reason=reason, repeated=is_repeated)


def _check_sampling(sampling: SamplingParams) -> None:
    for name, is_valid, wanted in (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
    ):
        if not is_valid:
            value = getattr(sampling, name)
            raise ApiError(400, f"{name} is {value}; it must be {wanted}", param=f"sampling_params.{name}")
