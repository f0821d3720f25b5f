"""What the server calls, and what happens by itself as time passes."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from molt.agents.protocol import (
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
    SessionReply,
    SessionRequest,
    SessionResult,
)
from molt.train.controller.desk.leases import LeaseDesk
from molt.train.controller.desk.self_driven import SelfDriven
from molt.train.controller.desk.sessions import DeskSessions
from molt.train.controller.desk.settings import DeskSettings
from molt.train.errors import LedgerFullError
from molt.train.gateway.sessions import Sessions
from molt.train.pool.groups import ExperiencesOf
from molt.train.pool.leases import Expired
from molt.train.pool.pool import Pool
from molt.train.records.recording import Recording
from molt.train.server import ApiError

EXPIRY_INTERVAL_S = 1.0
STOPPING_S = 1.0
"""When to ask again where the server stops: of the one that follows."""

log = logging.getLogger(__name__)


class RolloutDesk:
    """Answers the control API of a run; see `molt.train.server.Desk`.

    What the ledger cannot take raises LedgerFullError, and has changed nothing.

    Args:
        pool: Whose leases are given out.
        sessions: The gateway's.
        settings: What leases and sessions are given.
        experiences_of: Makes experiences of trained segments; the pool has the same one.
        admit: Called whenever a worker asks for leases: opens what groups the staleness bound allows.
        progress: What `status` tells of the training loop.
    """

    def __init__(
        self,
        pool: Pool,
        sessions: Sessions,
        *,
        settings: DeskSettings,
        experiences_of: ExperiencesOf,
        admit: Callable[[], None],
        progress: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._pool, self._progress = pool, progress
        self._sessions = DeskSessions(pool, sessions, settings)
        self._leases = LeaseDesk(pool, self._sessions, settings=settings, experiences_of=experiences_of, admit=admit)
        self._self_driven = SelfDriven(pool, self._sessions, sessions, settings)
        self._is_closed = False
        self._is_full = False

    @property
    def num_leases(self) -> int:
        """Leases granted since the server started."""
        return self._leases.num_leases

    @property
    def num_results(self) -> int:
        """Results taken since then, those that do not count included."""
        return self._leases.num_results + self._self_driven.num_results

    # For workers.

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Grant leases, waiting for the first. Cancelling the wait grants none."""
        return await self._leases.lease(request)

    def take_back(self, reply: LeaseReply) -> None:
        """What was granted did not reach the worker."""
        if not self._is_closed:  # the next server takes back whatever is live
            self._leases.take_back(lease.lease_id for lease in reply.leases)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Keep leases alive."""
        return self._leases.heartbeat(request)

    async def report(self, lease_id: str, report: ResultReport) -> ResultReply:
        """Take the result of a lease, and what its session recorded."""
        self._refuse_when_closed()
        return await self._leases.report(lease_id, report)

    async def release(self, lease_id: str, request: ReleaseRequest) -> ResultReply:
        """Take a lease back unrun."""
        self._refuse_when_closed()
        return self._leases.release(lease_id, request)

    # For agents that no worker drives.

    def open_session(self, request: SessionRequest) -> SessionReply:
        """Open a session that no worker drives."""
        self._refuse_when_closed()
        return self._self_driven.open(request)

    async def finish_session(self, session_id: str, result: SessionResult) -> ResultReply:
        """Take the result of such a session, which closes it."""
        self._refuse_when_closed()
        return await self._self_driven.finish(session_id, result)

    # For both.

    def recording(self, session_id: str) -> Recording:
        """What a session has recorded so far, or had when it closed."""
        return self._sessions.recording(session_id)

    def status(self) -> Mapping[str, Any]:
        """The run at a glance."""
        return {
            **self._progress(),
            "pool": self._pool.status(),
            "num_open_sessions": len(self._sessions),
            "self_driven_sessions": self._self_driven.status(),
        }

    # As time passes.

    async def watch(self) -> None:
        """End leases and sessions as their time comes, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            try:
                self._leases.expire()
                await self._self_driven.expire()
                self._sessions.tidy()
                self._is_full = False
            except LedgerFullError as error:  # it all stays as it was, and is tried again
                if not self._is_full:
                    log.warning("nothing expires for now: %s", error)
                self._is_full = True

    async def expire(self) -> list[Expired]:
        """End the leases and sessions whose time has come, now."""
        expired = self._leases.expire()
        await self._self_driven.expire()
        self._sessions.tidy()
        await self._sessions.settled()
        return expired

    def rescue(self, traces: Path) -> int:
        """Keep what sessions had recorded when the last server died. Returns how many there were."""
        return self._sessions.rescue(traces)

    def finish(self) -> None:
        """Tell every worker that asks for anything, now or later, that the run is over. Results are still taken."""
        self._leases.finish()

    async def dismiss(self) -> None:
        """Wait until the workers that were heard of lately know that the run is over, and have given their leases back.

        At most a heartbeat's time.
        """
        await self._leases.dismiss()

    async def close(self) -> None:
        """Close every session, keeping what it recorded, and take nothing more."""
        self.finish()
        self._is_closed = True
        await self._self_driven.close()
        self._sessions.tidy()
        self._sessions.abandon(self._sessions.unkept())
        await self._sessions.settled()

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is stopping", retry_after_s=STOPPING_S)
