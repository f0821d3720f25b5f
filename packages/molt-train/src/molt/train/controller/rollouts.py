"""The rollout desk: what stands behind the control API. It gives leases sessions, and makes rollouts of their results.

lease    pool's assignment --> gateway session --> Lease
report   session's turns --> trajectory --> experiences --> Rollout --> pool
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from molt.agents.protocol import (
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
    SamplingParams,
    SessionCredentials,
    SessionReply,
    SessionRequest,
    SessionResult,
)
from molt.train.config import Config
from molt.train.controller.results import outcome_of, recording_of, recording_of_turns
from molt.train.gateway.seeds import seed_of
from molt.train.gateway.sessions import SamplingPolicy, Sessions
from molt.train.gateway.trace import delete_traces, read_traces
from molt.train.pool.groups import ExperiencesOf
from molt.train.pool.leases import Assignment, Expired
from molt.train.pool.pool import Pool
from molt.train.records.recording import Recording
from molt.train.records.rollout import Rollout, Task
from molt.train.server import ApiError
from molt.train.trajectory import DEFAULT_RULES, TrainingRules

MAX_WAIT_S = 60.0
"""Longest poll for leases, whatever a worker asks for."""
EXPIRY_INTERVAL_S = 1.0
HEARTBEATS_A_TTL = 3
"""Heartbeats that are due while a lease lives; a worker may miss all but one."""

log = logging.getLogger(__name__)


class DeskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What leases and sessions are given."""

    url: str
    """The server's origin as workers reach it."""
    model_name: str
    sampling_params: SamplingParams
    sampling_policy: SamplingPolicy
    group_size: int
    """Sessions that make a group, where no worker drives them."""
    timeout_s: float
    """Seconds a rollout may take."""
    heartbeat_s: float
    seed: int | None = None
    """What the sampling seeds of leases are made of; None: they have none."""
    rules: TrainingRules = DEFAULT_RULES
    """What of the recordings is trained."""
    max_closed_sessions: int = 256
    """Sessions that the gateway still knows after they closed; of older ones it says, as of strangers, unauthorized."""

    @classmethod
    def of(cls, config: Config, url: str) -> "DeskSettings":
        """As a run's configuration says."""
        rollout = config.rollout
        return cls(
            url=url,
            model_name=config.model.name,
            sampling_params=SamplingParams(
                max_tokens=rollout.max_tokens, temperature=rollout.temperature, top_p=rollout.top_p
            ),
            sampling_policy=rollout.sampling_policy,
            group_size=rollout.group_size,
            timeout_s=rollout.timeout_s,
            heartbeat_s=config.pool.lease_ttl_s / HEARTBEATS_A_TTL,
            seed=config.run.seed if rollout.seeded else None,
            rules=TrainingRules.of(config),
        )


class RolloutDesk:
    """Answers the control API of a run; see `molt.train.server.Desk`.

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
        self._pool = pool
        self._sessions = sessions
        self._settings = settings
        self._experiences_of = experiences_of
        self._admit = admit
        self._progress = progress
        self._open: dict[str, SessionRequest | None] = {}
        """Sessions without a result, by id; None where a lease drives them."""
        self._kept: dict[str, None] = {}
        """Closed sessions whose recordings are in the ledger, the oldest first."""
        self._is_finished = False
        self._is_closed = False
        self.num_leases = 0
        """Leases granted since the server started."""
        self.num_results = 0
        """Results taken since then, those that do not count included."""

    # For workers.

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Grant leases, waiting for the first. Cancelling the wait grants none."""
        if request.capacity < 1:
            raise ApiError(400, f"capacity is {request.capacity}; it must be at least 1", param="capacity")
        now = asyncio.get_running_loop().time
        deadline = now() + min(request.wait_s, MAX_WAIT_S)
        assignments: list[Assignment] = []
        while not self._is_finished:
            self._admit()
            assignments = self._pool.acquire(request.worker_id, request.capacity)
            if assignments or now() >= deadline:
                break
            await self._pool.wait_offers(deadline - now())
        # Nothing is awaited from here on, so that no lease is granted to a request that was cancelled.
        leases = tuple(self._lease(assignment) for assignment in assignments)
        self.num_leases += len(leases)
        return LeaseReply(leases=leases, heartbeat_s=self._settings.heartbeat_s, finished=self._is_finished)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Keep leases alive."""
        return HeartbeatReply(lost=tuple(self._pool.heartbeat(request.worker_id, request.lease_ids)))

    async def report(self, lease_id: str, report: ResultReport) -> ResultReply:
        """Take the result of a lease, and what its session recorded."""
        self._refuse_when_closed()
        lease = self._pool.ledger.lease(lease_id)
        if lease is None:
            return _refusal(lease_id, self._pool.check(lease_id, report.attempt))
        self.num_results += 1
        recording = await self._record(lease.session_id)
        is_live = self._pool.check(lease_id, report.attempt) is None
        segments = recording.segments if recording else []
        rollout = Rollout(
            rollout_id=lease.rollout_id,
            group_id=lease.group_id,
            attempt=report.attempt,
            outcome=outcome_of(report),
            experiences=self._experiences_of(segments, lease.rollout_id, lease.group_id) if is_live else (),
            delivered_fraction=recording.delivered_fraction if recording else 1.0,
        )
        turns = recording.turns if recording else []
        counters = recording.counters if recording else None
        verdict = self._pool.report(lease_id, report.attempt, rollout, segments, turns, counters=counters)
        if recording is not None:
            self._retire(recording.session_id)
        if not verdict.accepted:
            return _refusal(lease_id, verdict.reason)
        return ResultReply(accepted=True, reason=verdict.reason)

    async def release(self, lease_id: str, request: ReleaseRequest) -> ResultReply:
        """Take a lease back unrun."""
        self._refuse_when_closed()
        lease = self._pool.ledger.lease(lease_id)
        refusal = self._pool.release(lease_id, request.attempt)
        if lease is None or refusal is not None:
            return _refusal(lease_id, refusal)
        await self._abandon(lease.session_id)
        return ResultReply(accepted=True)

    async def watch_leases(self) -> None:
        """End the leases of silent workers as they expire, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self.expire()

    async def expire(self) -> list[Expired]:
        """End the leases that have expired, and their sessions."""
        expired = self._pool.expire()
        for lease in expired:
            log.warning(
                "worker %s is silent: attempt %d at rollout %s is given up%s",
                lease.worker_id,
                lease.attempt,
                lease.rollout_id,
                "" if lease.retried else ", it was the last",
            )
        await asyncio.gather(*(self._abandon(lease.session_id) for lease in expired))
        return expired

    # For agents that no worker drives.

    def open_session(self, request: SessionRequest) -> SessionReply:
        """Open a session that no worker drives."""
        self._refuse_when_closed()
        sampling = request.sampling_params or self._settings.sampling_params
        _check_sampling(sampling)
        policy = request.sampling_policy or self._settings.sampling_policy
        credentials = self._credentials(sampling, policy, metadata=request.metadata, request=request)
        return SessionReply(**msgspec.structs.asdict(credentials))

    async def finish_session(self, session_id: str, result: SessionResult) -> ResultReply:
        """Take the result of such a session, which closes it."""
        self._refuse_when_closed()
        if self._open.get(session_id) is None:
            return self._refuse_session(session_id)
        recording = await self._record(session_id)
        request = self._open.get(session_id)
        if recording is None or request is None:
            return self._refuse_session(session_id)
        self.num_results += 1
        outcome, reason = outcome_of(result), None
        if request.group is None:
            self._pool.keep_session(recording, outcome)
        else:
            task = Task(task_id=request.group, data=request.task or {})
            size = self._settings.group_size
            verdict = self._pool.collect(request.group, task=task, size=size, outcome=outcome, recording=recording)
            reason = verdict.reason
        self._retire(session_id)
        return ResultReply(accepted=True, reason=reason)

    # For both.

    def recording(self, session_id: str) -> Recording:
        """What a session has recorded so far, or had when it closed."""
        session = self._sessions.get(session_id)
        if session is not None and session_id not in self._kept:
            return recording_of(session, self._settings.rules)
        recording = self._pool.ledger.recording(session_id)
        if recording is None:
            raise ApiError(404, f"session {session_id!r} is unknown")
        return recording

    def status(self) -> Mapping[str, Any]:
        """The run at a glance."""
        return {**self._progress(), "pool": self._pool.status(), "num_open_sessions": len(self._open)}

    def rescue(self, traces: Path) -> int:
        """Keep what sessions had recorded when the last server died. Returns how many there were."""
        left = read_traces(traces)
        lost = [session_id for session_id in left if self._pool.ledger.recording(session_id) is None]
        for session_id in lost:
            self._pool.keep_session(recording_of_turns(session_id, left[session_id], self._settings.rules), None)
        delete_traces(traces)
        return len(lost)

    def finish(self) -> None:
        """Tell every worker that asks for leases, now or later, that the run is over. Results are still taken."""
        self._is_finished = True
        self._pool.wake()

    async def close(self) -> None:
        """Close every session, keeping what it recorded, and take nothing more."""
        self.finish()
        self._is_closed = True
        await asyncio.gather(*(self._abandon(session_id) for session_id in list(self._open)))

    # Sessions.

    def _lease(self, assignment: Assignment) -> Lease:
        sampling = self._settings.sampling_params
        names = {name: getattr(assignment, name) for name in ("lease_id", "rollout_id", "group_id", "attempt")}
        seed = self._seed_of(assignment)
        session = self._credentials(sampling, self._settings.sampling_policy, metadata=names, request=None, seed=seed)
        self._pool.attach_session(assignment.lease_id, session.session_id)
        return Lease(
            **names,
            task=assignment.task.data,
            session=session,
            sampling_params=sampling,
            timeout_s=self._settings.timeout_s,
        )

    def _seed_of(self, assignment: Assignment) -> int | None:
        """The seed of a lease's session.

        A task that comes again, in another epoch or attempt, draws anew; in another evaluation it draws the same, so
        that two evaluations differ by the policy alone.
        """
        if self._settings.seed is None:
            return None
        position = assignment.position
        task = assignment.task.task_id if position is None else position
        return seed_of(self._settings.seed, assignment.kind, task, assignment.member, assignment.attempt)

    def _credentials(
        self,
        sampling: SamplingParams,
        policy: SamplingPolicy,
        *,
        metadata: dict[str, Any],
        request: SessionRequest | None,
        seed: int | None = None,
    ) -> SessionCredentials:
        session, api_key = self._sessions.open(
            sampling=sampling,
            policy=policy,
            expected_sampling=self._settings.sampling_params,
            metadata=metadata,
            seed=seed,
        )
        self._open[session.session_id] = request
        url = f"{self._settings.url}/s/{session.session_id}"
        return SessionCredentials(
            session_id=session.session_id,
            session_url=url,
            base_url=f"{url}/v1",
            api_key=api_key,
            model_name=self._settings.model_name,
        )

    async def _record(self, session_id: str | None) -> Recording | None:
        """Close a session and say what it recorded; None when the ledger has that already, or there is no session."""
        if session_id is None or session_id in self._kept or self._sessions.get(session_id) is None:
            return None
        try:
            session = await self._sessions.close(session_id)
        except TimeoutError:
            log.warning("session %s: a model call did not end; its tokens are not recorded", session_id)
            session = self._sessions.get(session_id)
        # Whoever closed it at the same moment may have kept it meanwhile.
        if session is None or session_id in self._kept:
            return None
        return recording_of(session, self._settings.rules)

    async def _abandon(self, session_id: str | None) -> None:
        """Close a session that no result is expected of any more, and keep what it recorded."""
        recording = await self._record(session_id)
        if recording is not None:
            self._pool.keep_session(recording, None)
            self._retire(recording.session_id)

    def _retire(self, session_id: str) -> None:
        """A closed session's recording is in the ledger now, so the gateway may forget it some time."""
        self._open.pop(session_id, None)
        self._kept[session_id] = None
        session = self._sessions.get(session_id)
        if session is not None and session.trace is not None:
            session.trace.discard()
        while len(self._kept) > self._settings.max_closed_sessions:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._sessions.forget(oldest)

    def _refuse_session(self, session_id: str) -> ResultReply:
        if session_id in self._open:
            return _refusal(session_id, "the session belongs to a lease, and its worker reports the result")
        if session_id in self._kept or self._pool.ledger.recording(session_id) is not None:
            return _refusal(session_id, "the session has its result already")
        raise ApiError(404, f"session {session_id!r} is unknown")

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is stopping")


def _refusal(name: str, reason: str | None) -> ResultReply:
    log.info("%s: refused, %s", name, reason)
    return ResultReply(accepted=False, reason=reason)


def _check_sampling(sampling: SamplingParams) -> None:
    for name, is_valid, wanted in (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
    ):
        if not is_valid:
            value = getattr(sampling, name)
            raise ApiError(400, f"{name} is {value}; it must be {wanted}", param=f"sampling_params.{name}")
