"""The pool: tasks go in as groups, workers lease their members, complete groups come out. Each exactly once.

        open_group                acquire                report                  take
    task ---------> waiting members ------> live leases ------> finished members ----> complete groups
                          ^                      |
                          +----------------------+
              release, expire, an outcome to be retried: the next attempt

What a caller is told has happened is durable. One event loop owns the pool; no method but the three waits gives
control away.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from molt.train.config import PoolConfig
from molt.train.errors import LedgerFullError
from molt.train.pool.books import Books
from molt.train.pool.collecting import Collecting
from molt.train.pool.groups import ExperiencesOf
from molt.train.pool.leases import Assignment, CutLease, Expired, LeaseTable, LiveLease, ReportVerdict
from molt.train.pool.ledger import Ledger
from molt.train.pool.rows import GroupKind, GroupRow, ResultRow, SessionState
from molt.train.pool.status import PoolStatus, status_of
from molt.train.pool.workers import WorkerTable
from molt.train.records.recording import Recording
from molt.train.records.rollout import Group, Outcome, Rollout, Task
from molt.train.records.trajectory import Segment
from molt.train.records.turn import Turn

STALE = "stale"
"""The reason of groups that are dropped because of their age."""


class Pool:
    """Leases, groups and the queue of complete ones, rebuilt from `ledger`.

    Args:
        ledger: The run's ledger, freshly opened.
        settings: Attempts a rollout, what outcomes do, the time to live of a lease, and how long sessions are waited
            for.
        clock: Seconds that never go back (`time.monotonic`).
        experiences_of: Makes the experiences of rollouts that come from the ledger or from self-driven sessions.
    """

    def __init__(
        self, ledger: Ledger, *, settings: PoolConfig, clock: Callable[[], float], experiences_of: ExperiencesOf
    ) -> None:
        self.ledger = ledger
        self.workers = WorkerTable(clock=clock)
        self._leases = LeaseTable(ttl_s=settings.lease_ttl_s, clock=clock)
        self._books = Books(ledger, leases=self._leases, settings=settings, experiences_of=experiences_of)
        self._collecting = Collecting(self._books, settings=settings, clock=clock, experiences_of=experiences_of)
        self._next_position = ledger.next_position()

    # The controller's side.

    @property
    def next_position(self) -> int:
        """The first data position that no train group was taken from, restarts included."""
        return self._next_position

    @property
    def num_open(self) -> int:
        """Train groups that workers are still to finish. Groups collected from self-driven sessions do not count."""
        return self._books.num_driven

    @property
    def num_ready(self) -> int:
        """Complete train groups that wait to be taken."""
        return self._books.complete.count("train")

    @property
    def counters(self) -> Counter[str]:
        """How often each named thing happened since the server started."""
        return self._books.counters

    @property
    def quarantined(self) -> Mapping[str, Sequence[str]]:
        """The tasks that killed all attempts at a rollout, by id, with the attempts' errors. Not to be opened again."""
        return self._books.quarantine.tasks

    def open_group(self, task: Task, *, kind: GroupKind, size: int, position: int | None, extra: int = 0) -> str:
        """Offer rollouts of `task` to workers. Returns the group's id.

        Args:
            task: What they are of.
            kind: Whether they are trained on.
            size: Rollouts that make the group.
            position: Where in the data order the task comes from; None for an evaluation.
            extra: Further rollouts that are offered. The first `size` that count make the group; those that are still
                to end then are cut.
        """
        group = self._books.open_group(task, kind=kind, size=size, position=position, extra=extra)
        if kind == "train" and position is not None:
            self._next_position = max(self._next_position, position + 1)
        return group.row.group_id

    async def wait_groups(self, n: int, timeout_s: float) -> bool:
        """Wait until `n` complete train groups are ready. False when `timeout_s` seconds passed first."""
        return await self._books.complete.wait_count(n, timeout_s)

    def take(self, n: int) -> list[Group]:
        """The `n` ready train groups with the oldest tokens. Raises ValueError when fewer are ready.

        They are the caller's now, to be recorded in a window or dropped; after a restart without either they are
        ready again.
        """
        complete = self._books.complete
        return complete.remove("train", complete.oldest(n))

    def drop(self, group_id: str, reason: str) -> None:
        """A complete train group, taken or not, will not be trained on. Raises ValueError when it is not complete."""
        self._books.drop_complete(group_id, reason)

    def discard_stale(self, before: int) -> list[GroupRow]:
        """Drop, as `stale`, what is too old to be trained, so that nobody works on it any more.

        These are the open train groups, and the complete ones that nobody took, with a token of a policy version older
        than `before`. Returns them; whoever opened them may open their tasks anew.
        """
        books = self._books
        is_stale = [
            group
            for group in books.open.values()
            if group.row.kind == "train" and group.oldest_version is not None and group.oldest_version < before
        ]
        rows = [books.give_up(group, "dropped", STALE) for group in is_stale]
        for group_id in books.complete.older_than(before):
            books.drop_complete(group_id, STALE)
            row = self.ledger.group(group_id)
            assert row is not None, "a group that was dropped is in the ledger"
            rows.append(row)
        self.counters["groups_stale"] += len(rows)
        return rows

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
        return status_of(self._books, self.workers)

    # The workers' side.

    def acquire(self, worker_id: str, capacity: int, labels: Mapping[str, str] | None = None) -> list[Assignment]:
        """Lease up to `capacity` more rollouts to a worker, those of the oldest groups first.

        Only of tasks all of whose labels are among the worker's `labels`.
        """
        held = self._leases.by_worker.get(worker_id, 0)
        self.workers.seen(worker_id, capacity=held + capacity, labels=labels or {})
        return self._books.grant(worker_id, capacity, labels)

    async def wait_offers(self, timeout_s: float, labels: Mapping[str, str] | None = None) -> bool:
        """Wait until a rollout waits for a worker with these labels, or `wake`.

        False when `timeout_s` seconds passed first.
        """
        return await self._books.offers.wait(timeout_s, labels)

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
        self.workers.seen(worker_id)
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

        The policies `pool.on_...` say whether the outcome finishes the rollout, makes it wait for its next attempt, or
        fails its group. A refused report (late, repeated, of another run, of a rollout that was cut) is kept in the
        ledger and changes nothing else.
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
        return self._books.end_attempt(lease, rollout, state="reported", recording=recording)

    def release(self, lease_id: str, attempt: int) -> str | None:
        """Take a lease back unrun and offer the rollout again; this spends no attempt. Returns why not, or None."""
        lease = self._leases.get(lease_id)
        refusal = self.check(lease_id, attempt)
        if lease is None or refusal is not None:
            return refusal
        self._books.retry(lease, "released")
        return None

    def expire(self) -> list[Expired]:
        """End the leases whose workers have been silent for the time to live. Each spends an attempt.

        Groups of sessions that did not fill in time fail, and workers without leases that were silent for long are
        forgotten. Raises LedgerFullError when the disk is full before any lease has ended.
        """
        self._collecting.expire()
        expired: list[Expired] = []
        for lease in self._leases.overdue():
            # The end of another may have failed its group, and so cut this one.
            if self._leases.get(lease.lease_id) is not lease:
                continue
            try:
                expired.append(self._expire(lease))
            except LedgerFullError:
                if not expired:
                    raise
                break  # the caller has to know of those that did end
        self.counters["workers_lost"] += len(self.workers.forget_silent(holders=self._leases.by_worker))
        return expired

    def take_cut(self) -> list[CutLease]:
        """The leases that were cut since the last call. Their sessions are of no more use."""
        cut, self._books.cut = self._books.cut, []
        return cut

    # Self-driven sessions.

    def collect(self, key: str, *, task: Task, size: int, outcome: Outcome, recording: Recording) -> ReportVerdict:
        """Add a finished session that no worker drove to the open group of `key`, or to a new one of `size`.

        An infrastructure outcome is kept, but takes no place in the group, since nobody would run it again; for the
        same reason `retry` is as `mask`. A group that `pool.group_wait_s` does not see full fails.
        """
        return self._collecting.collect(key, task=task, size=size, outcome=outcome, recording=recording)

    def keep_session(self, recording: Recording, outcome: Outcome | None, state: SessionState | None = None) -> None:
        """Keep what a session of no group recorded, or one without a result (`outcome` None).

        `state` is where a session that no worker drives goes with it. Raises ValueError where the ledger has none such.
        """
        self._collecting.keep(recording, outcome, state)

    def _expire(self, lease: LiveLease) -> Expired:
        error = f"no heartbeat for {self._leases.ttl_s:g} s from worker {lease.worker_id!r}, attempt {lease.attempt}"
        rollout = Rollout(
            rollout_id=lease.rollout_id,
            group_id=lease.group_id,
            attempt=lease.attempt,
            outcome=Outcome(kind="infrastructure", error=error),
            experiences=(),
        )
        verdict = self._books.end_attempt(lease, rollout, state="expired")
        return Expired(
            lease_id=lease.lease_id,
            rollout_id=lease.rollout_id,
            attempt=lease.attempt,
            worker_id=lease.worker_id,
            session_id=lease.session_id,
            retried=verdict.retried,
        )
