"""Leases of workers: granted, kept alive, reported, given back; and, at the end, that everybody knows of it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from molt.agents.protocol import (
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    ResultReply,
    ResultReport,
)
from molt.train.controller.desk.sessions import DeskSessions
from molt.train.controller.desk.settings import DeskSettings
from molt.train.controller.results import outcome_of
from molt.train.errors import LedgerFullError
from molt.train.gateway.seeds import seed_of
from molt.train.pool.groups import ExperiencesOf
from molt.train.pool.leases import Assignment, Expired
from molt.train.pool.pool import Pool
from molt.train.pool.rows import LeaseRow
from molt.train.pool.workers import WorkerRow
from molt.train.records.rollout import Rollout
from molt.train.server import ApiError, no_room

MAX_WAIT_S = 60.0
"""Longest poll for leases, whatever a worker asks for."""
BUSY_S = 2.0
"""When to ask again where too many wait already."""
FAREWELL_SLACK_S = 2.0

log = logging.getLogger(__name__)


class LeaseDesk:
    """Answers workers.

    Args:
        pool: Whose leases are given out.
        sessions: Where their model calls go.
        settings: What leases are given.
        experiences_of: Makes experiences of trained segments; the pool has the same one.
        admit: Called whenever a worker asks for leases: opens what groups the staleness bound allows.
    """

    def __init__(
        self,
        pool: Pool,
        sessions: DeskSessions,
        *,
        settings: DeskSettings,
        experiences_of: ExperiencesOf,
        admit: Callable[[], None],
    ) -> None:
        self._pool, self._sessions, self._settings = pool, sessions, settings
        self._experiences_of, self._admit = experiences_of, admit
        self._unheard: dict[str, int] = {}
        """Attempt of each lease that its worker has said nothing of yet: it may never have arrived."""
        self._answered: dict[str, tuple[str, tuple[str, ...]]] = {}
        """By worker, its last request for leases that had any, and those."""
        self._returning: dict[str, int] = {}
        """Leases to be taken back, with their attempts."""
        self._num_polls = 0
        self._is_finished = False
        self._told: set[str] = set()
        """Workers that know that the run is over."""
        self._was_told = asyncio.Event()
        self.num_leases = 0
        self.num_results = 0

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """See `RolloutDesk.lease`."""
        if request.capacity < 1:
            raise ApiError(400, f"capacity is {request.capacity}; it must be at least 1", param="capacity")
        self._take_back_unread(request)
        assignments = await self._acquire(request)
        # Nothing is awaited from here on, so that no lease is granted to a request that was cancelled.
        leases = self._with_sessions(assignments)
        self.num_leases += len(leases)
        if leases:
            self._unheard.update({lease.lease_id: lease.attempt for lease in leases})
            self._answered[request.worker_id] = request.request_id, tuple(lease.lease_id for lease in leases)
        finished = self._tell(request.worker_id)
        return LeaseReply(leases=leases, heartbeat_s=self._settings.heartbeat_s, finished=finished)

    def take_back(self, lease_ids: Iterable[str]) -> None:
        """Leases did not reach their worker, as far as is known: offer their rollouts again, at no cost."""
        self._returning.update({i: self._unheard[i] for i in lease_ids if i in self._unheard})
        self._return()

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """See `RolloutDesk.heartbeat`."""
        for lease_id in request.lease_ids:
            self._unheard.pop(lease_id, None)
        lost = self._pool.heartbeat(request.worker_id, request.lease_ids)
        return HeartbeatReply(lost=tuple(lost), finished=self._tell(request.worker_id))

    async def report(self, lease_id: str, report: ResultReport) -> ResultReply:
        """See `RolloutDesk.report`."""
        lease = self._pool.ledger.lease(lease_id)
        if lease is None:
            return self._refusal(lease_id, report.worker_id, self._pool.check(lease_id, report.attempt))
        self.num_results += 1
        recording = await self._sessions.record(lease.session_id)
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
        self._unheard.pop(lease_id, None)
        if recording is not None:
            self._sessions.kept(recording.session_id)
        self.end_cut()
        if not verdict.accepted:
            return self._refusal(lease_id, report.worker_id, verdict.reason, repeated=self._is_repeated(lease, report))
        return ResultReply(accepted=True, reason=verdict.reason, finished=self._tell(report.worker_id))

    def release(self, lease_id: str, request: ReleaseRequest) -> ResultReply:
        """See `RolloutDesk.release`."""
        lease = self._pool.ledger.lease(lease_id)
        refusal = self._pool.release(lease_id, request.attempt)
        if lease is None or refusal is not None:
            return self._refusal(lease_id, request.worker_id, refusal)
        self._unheard.pop(lease_id, None)
        self._sessions.abandon([lease.session_id])
        return ResultReply(accepted=True, finished=self._tell(request.worker_id))

    def expire(self) -> list[Expired]:
        """End the leases of silent workers."""
        expired = self._pool.expire()
        for lease in expired:
            self._unheard.pop(lease.lease_id, None)
            log.warning(
                "worker %s is silent: attempt %d at rollout %s is given up%s",
                lease.worker_id,
                lease.attempt,
                lease.rollout_id,
                "" if lease.retried else ", it was the last",
            )
        self._sessions.abandon(lease.session_id for lease in expired)
        self.end_cut()
        self._return()
        self._answered = {w: answer for w, answer in self._answered.items() if w in self._pool.workers}
        return expired

    def end_cut(self) -> None:
        """Close the sessions of leases that were cut. Their workers learn of it by their next heartbeat."""
        cut = self._pool.take_cut()
        for lease in cut:
            self._unheard.pop(lease.lease_id, None)
        self._sessions.abandon(lease.session_id for lease in cut)

    def finish(self) -> None:
        """Tell every worker that asks for anything, now or later, that the run is over. Results are still taken."""
        self._is_finished = True
        self._pool.wake()

    async def dismiss(self) -> None:
        """Wait until all workers that were heard of lately know that the run is over, and have given their leases back.

        At most a heartbeat's time, after which each should have been heard of.
        """
        self.finish()
        limit_s = self._settings.heartbeat_s + FAREWELL_SLACK_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(worker.seen_s <= limit_s and not self._is_done(worker) for worker in self._workers()):
                    self._was_told.clear()
                    await self._was_told.wait()

    def _workers(self) -> Sequence[WorkerRow]:
        return self._pool.status().workers

    def _is_done(self, worker: WorkerRow) -> bool:
        return worker.worker_id in self._told and not worker.leases

    async def _acquire(self, request: LeaseRequest) -> list[Assignment]:
        now = asyncio.get_running_loop().time
        deadline = now() + min(request.wait_s, MAX_WAIT_S)
        while not self._is_finished:
            if not self._pool.ledger.has_room():
                raise no_room("no leases are granted")
            self._admit()
            assignments = self._pool.acquire(request.worker_id, request.capacity, request.labels)
            if request.concurrency > 0:
                self._pool.workers.seen(request.worker_id, capacity=request.concurrency)
            left_s = deadline - now()
            if assignments or left_s <= 0:
                return assignments
            with self._polling():
                await self._pool.wait_offers(left_s, request.labels)
        return []

    @contextlib.contextmanager
    def _polling(self) -> Iterator[None]:
        limit = self._settings.max_polls
        if self._num_polls >= limit:
            raise ApiError(503, f"{limit} requests for leases are waiting already", retry_after_s=BUSY_S)
        self._num_polls += 1
        try:
            yield
        finally:
            self._num_polls -= 1

    def _with_sessions(self, assignments: list[Assignment]) -> tuple[Lease, ...]:
        try:
            return tuple([self._lease(assignment) for assignment in assignments])
        except LedgerFullError:
            self._returning.update({assignment.lease_id: assignment.attempt for assignment in assignments})
            self._return()
            raise

    def _lease(self, assignment: Assignment) -> Lease:
        settings = self._settings
        sampling = (assignment.kind == "eval" and settings.eval_sampling) or settings.sampling_params
        names = {name: getattr(assignment, name) for name in ("lease_id", "rollout_id", "group_id", "attempt")}
        session = self._sessions.open(
            sampling,
            settings.sampling_policy,
            # Nothing is asked of an evaluation but that it samples as it was told.
            expected=sampling,
            metadata=names,
            seed=self._seed_of(assignment),
        )
        try:
            self._pool.attach_session(assignment.lease_id, session.session_id)
        except LedgerFullError:
            self._sessions.unopen(session.session_id)
            raise
        return Lease(
            **names,
            task=assignment.task.data,
            session=session,
            sampling_params=sampling,
            timeout_s=settings.timeout_s,
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

    def _take_back_unread(self, request: LeaseRequest) -> None:
        """A worker that asks the same again was not given what it was granted."""
        request_id, lease_ids = self._answered.get(request.worker_id, ("", ()))
        if request_id and request_id == request.request_id:
            self.take_back(lease_ids)

    def _return(self) -> None:
        """Take back what is to be; what a full disk does not let be taken back is tried again."""
        for lease_id, attempt in list(self._returning.items()):
            lease = self._pool.ledger.lease(lease_id)
            try:
                refusal = self._pool.release(lease_id, attempt)
            except LedgerFullError as error:
                log.warning("leases are taken back later: %s", error)
                return
            del self._returning[lease_id]
            self._unheard.pop(lease_id, None)
            if refusal is None and lease is not None:
                self._pool.counters["leases_taken_back"] += 1
                self._sessions.abandon([lease.session_id])

    def _is_repeated(self, lease: LeaseRow, report: ResultReport) -> bool:
        now = self._pool.ledger.lease(lease.lease_id)
        is_same = (lease.worker_id, lease.attempt) == (report.worker_id, report.attempt)
        return is_same and now is not None and now.state == "reported"

    def _tell(self, worker_id: str) -> bool:
        if self._is_finished:
            self._told.add(worker_id)
            self._was_told.set()
        return self._is_finished

    def _refusal(self, lease_id: str, worker_id: str, reason: str | None, *, repeated: bool = False) -> ResultReply:
        log.info("%s: refused, %s", lease_id, reason)
        return ResultReply(accepted=False, reason=reason, repeated=repeated, finished=self._tell(worker_id))
