"""The sessions of one server, from their opening until their recordings are in the ledger."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from molt.agents.protocol import SamplingParams, SessionCredentials
from molt.train.controller.desk.settings import DeskSettings
from molt.train.controller.results import recording_of, recording_of_turns
from molt.train.errors import LedgerFullError
from molt.train.gateway.sessions import SamplingPolicy, Session, Sessions
from molt.train.gateway.trace import delete_traces, read_traces
from molt.train.pool.pool import Pool
from molt.train.records.recording import Recording
from molt.train.server import ApiError

log = logging.getLogger(__name__)


class DeskSessions:
    """Opens sessions in the gateway, and moves what they recorded to the ledger.

    A session whose recording the ledger has is forgotten by and by; of its turns nothing stays in memory.
    """

    def __init__(self, pool: Pool, sessions: Sessions, settings: DeskSettings) -> None:
        self._pool, self._sessions, self._settings = pool, sessions, settings
        self._unkept: set[str] = set()
        """Open sessions, and closed ones whose recordings the ledger has not taken yet."""
        self._kept: dict[str, None] = {}
        """Closed sessions that the gateway still knows, the oldest first."""
        self._abandoned: set[str] = set()
        """Sessions that no result is expected of any more, as long as they are unkept."""
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Sessions whose recordings are not in the ledger yet."""
        return len(self._unkept)

    def open(
        self,
        sampling: SamplingParams,
        policy: SamplingPolicy,
        *,
        expected: SamplingParams,
        metadata: dict[str, Any],
        seed: int | None = None,
    ) -> SessionCredentials:
        """Open a session; see `Sessions.open`."""
        session, api_key = self._sessions.open(
            sampling=sampling, policy=policy, expected_sampling=expected, metadata=metadata, seed=seed
        )
        self._unkept.add(session.session_id)
        url = f"{self._settings.url}/s/{session.session_id}"
        return SessionCredentials(
            session_id=session.session_id,
            session_url=url,
            base_url=f"{url}/v1",
            api_key=api_key,
            model_name=self._settings.model_name,
        )

    def unopen(self, session_id: str) -> None:
        """A session was opened, but its client was not told."""
        self._unkept.discard(session_id)
        self._sessions.forget(session_id)

    def unkept(self) -> list[str]:
        """The sessions whose recordings are not in the ledger yet."""
        return list(self._unkept)

    def get(self, session_id: str) -> Session | None:
        """A session whose recording the ledger has not yet."""
        return self._sessions.get(session_id) if session_id in self._unkept else None

    async def record(self, session_id: str | None, reason: str | None = None) -> Recording | None:
        """Close a session and say what it recorded; None when the ledger has that already, or there is no session.

        `reason`: why it is closed, if that is not that its result came.
        """
        if session_id is None or self.get(session_id) is None:
            return None
        try:
            session = await self._sessions.close(session_id, reason)
        except TimeoutError:
            log.warning("session %s: a model call did not end; its tokens are not recorded", session_id)
            session = self._sessions.get(session_id)
        # Whoever closed it at the same moment may have kept it meanwhile.
        if session is None or session_id not in self._unkept:
            return None
        return recording_of(session, self._settings.rules)

    def kept(self, session_id: str) -> None:
        """A closed session's recording is in the ledger now, so its turns leave memory, and itself some time."""
        if session_id not in self._unkept:
            return
        self._unkept.discard(session_id)
        self._abandoned.discard(session_id)
        self._kept[session_id] = None
        self._sessions.release(session_id)
        while len(self._kept) > self._settings.max_closed_sessions:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._sessions.forget(oldest)

    def abandon(self, session_ids: Iterable[str | None]) -> None:
        """Close sessions soon that no result is expected of any more, and keep what they recorded."""
        for session_id in session_ids:
            if session_id is not None and session_id in self._unkept and session_id not in self._abandoned:
                self._abandoned.add(session_id)
                self._close_soon(session_id)

    def tidy(self) -> None:
        """Try again to keep what a full disk has not taken."""
        if not self._closing:
            for session_id in self._abandoned:
                self._close_soon(session_id)

    async def settled(self) -> None:
        """Wait until the abandoned sessions are closed."""
        while self._closing:
            await asyncio.wait(set(self._closing))

    def recording(self, session_id: str) -> Recording:
        """What a session has recorded so far, or had when it closed. Raises ApiError for an unknown one."""
        session = self.get(session_id)
        if session is not None:
            return recording_of(session, self._settings.rules)
        recording = self._pool.ledger.recording(session_id)
        if recording is None:
            raise ApiError(404, f"session {session_id!r} is unknown")
        return recording

    def rescue(self, traces: Path) -> int:
        """Keep what sessions had recorded when the last server died. Returns how many there were."""
        left = read_traces(traces)
        lost = [session_id for session_id in left if self._pool.ledger.recording(session_id) is None]
        for session_id in lost:
            self._pool.keep_session(recording_of_turns(session_id, left[session_id], self._settings.rules), None)
        delete_traces(traces)
        return len(lost)

    def _close_soon(self, session_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._close_abandoned(session_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_abandoned(self, session_id: str) -> None:
        recording = await self.record(session_id, "its lease is over")
        if recording is None:
            return
        try:
            self._pool.keep_session(recording, None)
        except LedgerFullError as error:
            log.warning("session %s: what it recorded waits in memory: %s", session_id, error)
        else:
            self.kept(session_id)
