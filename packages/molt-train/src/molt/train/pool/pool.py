"""The pool: tasks go in as groups, workers lease their members, complete groups come out. Each exactly once.

        open_group                acquire                report                  take
    task ---------> waiting members ------> live leases ------> finished members ----> complete groups
                          ^                      |
                          +----------------------+
                release, expire, infrastructure outcome: the next attempt

What a caller is told has happened is durable. One event loop owns the pool; no method but the three waits gives
control away.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from molt.train.config import PoolConfig
from molt.train.pool.books import Books
from molt.train.pool.groups import ExperiencesOf
from molt.train.pool.leases import Assignment, Expired, LeaseTable, LiveLease, ReportVerdict
from molt.train.pool.ledger import Ledger
from molt.train.pool.rows import GroupKind, ResultRow
from molt.train.records.recording import Recording
from molt.train.records.rollout import Group, Outcome, Rollout, Task
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at a glance."""

    num_open: int
    num_ready: int
    num_waiting: int
    """Rollouts that wait for a worker."""
    num_leased: int
    leases_by_worker: dict[str, int]
    counters: dict[str, int]
    """How often each named thing happened since the server started."""


class Pool:
    """Leases, groups and the queue of complete ones, rebuilt from `ledger`.

    Args:
        ledger: The run's ledger, freshly opened.
        settings: Attempts a rollout, and the time to live of a lease.
        clock: Seconds that never go back (`time.monotonic`).
        experiences_of: Makes the experiences of rollouts that come from the ledger or from self-driven sessions.
    """

    def __init__(
        self, ledger: Ledger, *, settings: PoolConfig, clock: Callable[[], float], experiences_of: ExperiencesOf
    ) -> None:
        self.ledger = ledger
        self._settings = settings
        self._experiences_of = experiences_of
        self._leases = LeaseTable(ttl_s=settings.lease_ttl_s, clock=clock)
        self._books = Books(ledger, leases=self._leases, experiences_of=experiences_of)
        self._next_position = ledger.next_position()

    # The controller's side.

    @property
    def next_position(self) -> int:
        """The first data position that no train group was taken from, restarts included."""
        return self._next_position

    @property
    def num_open(self) -> int:
        """Train groups that workers are still to finish. Groups collected from self-driven sessions do not count."""
        rows = (group.row for group in self._books.open.values())
        return sum(1 for row in rows if row.kind == "train" and row.key is None)

    @property
    def num_ready(self) -> int:
        """Complete train groups that wait to be taken."""
        return self._books.complete.count("train")

    @property
    def counters(self) -> Counter[str]:
        """How often each named thing happened since the server started."""
        return self._books.counters

    def open_group(self, task: Task, *, kind: GroupKind, size: int, position: int | None) -> str:
        """Offer `size` rollouts of `task` to workers. Returns the group's id.

        `position` says where in the data order the task comes from; None for an evaluation.
        """
        group = self._books.open_group(task, kind=kind, size=size, position=position)
        if kind == "train" and position is not None:
            self._next_position = max(self._next_position, position + 1)
        return group.row.group_id

    async def wait_groups(self, n: int, timeout_s: float) -> bool:
        """Wait until `n` complete train groups are ready. False when `timeout_s` seconds passed first."""
        return await self._books.complete.wait_count(n, timeout_s)

    def take(self, n: int) -> list[Group]:
        """The `n` train groups that completed first. Raises ValueError when fewer are ready.

        They are the caller's now, to be recorded in a window or dropped; after a restart without either they are
        ready again.
        """
        complete = self._books.complete
        return complete.remove("train", complete.first(n))

    def drop(self, group_id: str, reason: str) -> None:
        """A complete train group, taken or not, will not be trained on. Raises ValueError when it is not complete."""
        self.ledger.drop_group(group_id, reason)
        self._books.complete.remove("train", [group_id])
        self.counters["groups_dropped"] += 1

    async def wait_eval(self, group_ids: Sequence[str], timeout_s: float) -> bool:
        """Wait until all these evaluation groups are complete. False when `timeout_s` seconds passed first."""
        return await self._books.complete.wait_evals(group_ids, timeout_s)

    def take_eval(self, group_ids: Sequence[str]) -> list[Group]:
        """These evaluation groups, in the order given. Raises ValueError when one is not complete."""
        self.ledger.consume_eval(group_ids)
        return self._books.complete.remove("eval", group_ids)

    def recorded_groups(self, group_ids: Sequence[str]) -> list[Group]:
        """Groups that a window has consumed, from the ledger, to be trained again after a rewind.

        Raises:
            ValueError: a group was not consumed.
        """
        return [self._books.recorded_group(group_id) for group_id in group_ids]

    def status(self) -> PoolStatus:
        """The pool at a glance."""
        return PoolStatus(
            num_open=self.num_open,
            num_ready=self.num_ready,
            num_waiting=len(self._books.offers),
            num_leased=len(self._leases),
            leases_by_worker=self._leases.count_by_worker(),
            counters=dict(self.counters),
        )

    # The workers' side.

    def acquire(self, worker_id: str, capacity: int) -> list[Assignment]:
        """Lease up to `capacity` rollouts to a worker, those of the oldest groups first."""
        return self._books.grant(worker_id, capacity)

    async def wait_offers(self, timeout_s: float) -> bool:
        """Wait until a rollout waits for a worker, or `wake`. False when `timeout_s` seconds passed first."""
        return await self._books.offers.wait(timeout_s)

    def wake(self) -> None:
        """Let everyone in `wait_offers` look again."""
        self._books.offers.wake()

    def attach_session(self, lease_id: str, session_id: str) -> None:
        """Name the session that a live lease's model calls go to. Raises ValueError when the lease is over."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise ValueError(f"lease {lease_id!r} is not live, so no session can be attached to it")
        self.ledger.attach_session(lease_id, session_id)
        lease.session_id = session_id

    def heartbeat(self, worker_id: str, lease_ids: Sequence[str]) -> list[str]:
        """Keep a worker's leases alive. Returns those of `lease_ids` that it does not own (any more)."""
        return self._leases.renew(worker_id, lease_ids)

    def check(self, lease_id: str, attempt: int) -> str | None:
        """Why a report of this attempt would not count; None when it would."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            return None if lease.attempt == attempt else f"the lease is for attempt {lease.attempt}, not {attempt}"
        row = self.ledger.lease(lease_id)
        if row is None:
            return f"lease {lease_id!r} is unknown to this run"
        if row.state == "reported":
            return "the lease was reported before"
        return f"the lease is over ({row.state}), and attempt {row.attempt} of the rollout with it"

    def report(
        self,
        lease_id: str,
        attempt: int,
        rollout: Rollout,
        segments: Sequence[Segment],
        turns: Sequence[Turn],
        *,
        counters: Mapping[str, int] | None = None,
    ) -> ReportVerdict:
        """Take the result of an attempt, with what its session recorded; `counters` are the session's.

        An infrastructure outcome makes the rollout wait for its next attempt while it has one; any other finishes it.
        A refused report (late, repeated, of another run) is kept in the ledger and changes nothing else.
        """
        lease = self._leases.get(lease_id)
        refusal = self.check(lease_id, attempt)
        outcome = rollout.outcome
        recording = Recording(
            # A lease that was never given a session is recorded under its own name.
            session_id=(lease.session_id if lease else None) or lease_id,
            state="closed",
            turns=list(turns),
            segments=list(segments),
            counters=dict(counters or {}),
            delivered_fraction=rollout.delivered_fraction,
        )
        if lease is None or refusal is not None:
            result = ResultRow(outcome=outcome, counted=False, reason=refusal, lease_id=lease_id, attempt=attempt)
            self._books.refuse(result, recording)
            return ReportVerdict(accepted=False, reason=refusal)
        if outcome.kind == "infrastructure" and self._may_retry(lease):
            reason = f"infrastructure: {outcome.error}; attempt {attempt + 1} follows"
            self._books.retry(lease, "reported", outcome=outcome, reason=reason, recording=recording)
            return ReportVerdict(accepted=True, reason=reason)
        group = self._books.finish(self._books.row_of(lease), rollout, lease=lease, recording=recording)
        return ReportVerdict(accepted=True, group=group)

    def release(self, lease_id: str, attempt: int) -> str | None:
        """Take a lease back unrun and offer the rollout again; this spends no attempt. Returns why not, or None."""
        lease = self._leases.get(lease_id)
        refusal = self.check(lease_id, attempt)
        if lease is None or refusal is not None:
            return refusal
        self._books.retry(lease, "released")
        return None

    def expire(self) -> list[Expired]:
        """End the leases whose workers have been silent for the time to live. Each spends an attempt."""
        return [self._expire(lease) for lease in self._leases.overdue()]

    # Self-driven sessions.

    def collect(self, key: str, *, task: Task, size: int, outcome: Outcome, recording: Recording) -> ReportVerdict:
        """Add a finished session that no worker drove to the open group of `key`, or to a new one of `size`.

        An infrastructure outcome is kept, but takes no place in the group, since nobody would run it again.
        """
        if outcome.kind == "infrastructure":
            self.keep_session(recording, outcome)
            return ReportVerdict(accepted=True, reason="infrastructure: the session takes no place in its group")
        group = self._books.collecting.get(key)
        if group is None:
            group = self._books.open_group(task, kind="train", size=size, position=None, key=key)
        row = group.new_member(len(group.members))
        rollout = Rollout(
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            attempt=row.attempt,
            outcome=outcome,
            experiences=self._experiences_of(recording.segments, row.rollout_id, row.group_id),
            delivered_fraction=recording.delivered_fraction,
        )
        return ReportVerdict(accepted=True, group=self._books.finish(row, rollout, recording=recording))

    def keep_session(self, recording: Recording, outcome: Outcome | None) -> None:
        """Keep what a session of no group recorded, or one whose lease ended without a report (`outcome` None)."""
        with self.ledger.transaction():
            recording_id = self.ledger.add_recording(recording)
            if outcome is not None:
                self.ledger.add_result(ResultRow(outcome=outcome, counted=False), recording_id=recording_id)

    def _may_retry(self, lease: LiveLease) -> bool:
        return self._books.row_of(lease).failures + 1 < self._settings.max_attempts

    def _expire(self, lease: LiveLease) -> Expired:
        error = f"no heartbeat for {self._leases.ttl_s:g} s from worker {lease.worker_id!r}, attempt {lease.attempt}"
        outcome = Outcome(kind="infrastructure", error=error)
        retried = self._may_retry(lease)
        if retried:
            self._books.retry(lease, "expired", outcome=outcome, reason=error)
        else:
            rollout = Rollout(
                rollout_id=lease.rollout_id,
                group_id=lease.group_id,
                attempt=lease.attempt,
                outcome=outcome,
                experiences=(),
            )
            self._books.finish(self._books.row_of(lease), rollout, lease=lease, lease_state="expired")
        return Expired(
            lease_id=lease.lease_id,
            rollout_id=lease.rollout_id,
            attempt=lease.attempt,
            worker_id=lease.worker_id,
            session_id=lease.session_id,
            retried=retried,
        )
