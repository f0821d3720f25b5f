"""The books of the pool: its state, kept twice, in the ledger and in memory.

Every change is written to the ledger first, as one transaction, and only then made in memory: a write that fails has
changed nothing on either side, and a process that dies between the two finds its memory again in the ledger.
"""

import secrets
from collections import Counter
from collections.abc import Mapping

import msgspec

from molt.train.config import PoolConfig
from molt.train.pool.groups import ExperiencesOf, OpenGroup, restore_group
from molt.train.pool.leases import Assignment, CutLease, LeaseTable, LiveLease, ReportVerdict
from molt.train.pool.ledger import Ledger
from molt.train.pool.outcomes import consequence_of, why_group_failed
from molt.train.pool.quarantine import Quarantine
from molt.train.pool.queues import CompleteGroups, OfferQueue
from molt.train.pool.rows import GroupKind, GroupRow, GroupState, LeaseState, ResultRow, RolloutRow
from molt.train.records.recording import Recording
from molt.train.records.rollout import Group, Outcome, Rollout, Task


class Books:
    """Open groups, what waits for workers, live leases, and complete groups, rebuilt from `ledger`."""

    def __init__(
        self, ledger: Ledger, *, leases: LeaseTable, settings: PoolConfig, experiences_of: ExperiencesOf
    ) -> None:
        self.ledger = ledger
        self.leases = leases
        self.offers = OfferQueue()
        self.complete = CompleteGroups()
        self.open: dict[str, OpenGroup] = {}
        """By group id."""
        self.num_driven = 0
        """Open train groups that workers fill."""
        self.collecting: dict[str, OpenGroup] = {}
        """The open groups of self-driven sessions, by key."""
        self.cut: list[CutLease] = []
        """Leases that were cut and that nobody has asked for yet."""
        self.quarantine = Quarantine(ledger.quarantined())
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._experiences_of = experiences_of
        self.counters["leases_lost_to_restart"] += ledger.recover()
        self._next_seq = ledger.next_seq()
        for row in ledger.live_groups():
            group = restore_group(row, ledger.each_rollout(row.group_id), experiences_of)
            if row.state == "complete":
                self.complete.add(row.kind, group.to_group())
            else:
                self._enter(group)

    def row_of(self, lease: LiveLease) -> RolloutRow:
        """The rollout that a live lease is for."""
        return self.open[lease.group_id].members[lease.rollout_id]

    def open_group(
        self,
        task: Task,
        *,
        kind: GroupKind,
        size: int,
        position: int | None = None,
        extra: int = 0,
        key: str | None = None,
    ) -> OpenGroup:
        """A new group, whose members wait for workers; with a `key`, one that has no members yet."""
        if size < 1 or extra < 0:
            raise ValueError(f"group size is {size} and {extra} more; it must be at least 1 and 0 more")
        seq = self._next_seq
        group = OpenGroup(
            GroupRow(seq=seq, group_id=f"g{seq}", kind=kind, task=task, size=size, position=position, key=key)
        )
        if key is None:
            group.members.update((row.rollout_id, row) for row in map(group.new_member, range(size + extra)))
        with self.ledger.transaction():
            self.ledger.add_group(group.row)
            self.ledger.put_rollouts(list(group.members.values()))
        self._next_seq = seq + 1
        self._enter(group)
        return group

    def grant(self, worker_id: str, capacity: int, labels: Mapping[str, str] | None) -> list[Assignment]:
        """Lease what has waited longest of what the worker has the labels for, up to `capacity` rollouts."""
        offers = self.offers.oldest(capacity, labels)
        if not offers:
            return []
        old = [self.open[offer.group_id].members[offer.rollout_id] for offer in offers]
        rows = [msgspec.structs.replace(row, state="leased") for row in old]
        assignments = [self._assignment(row) for row in rows]
        with self.ledger.transaction():
            self.ledger.put_rollouts(rows)
            self.ledger.add_leases(assignments, worker_id)
        self.offers.remove(offers)
        for row, assignment in zip(rows, assignments, strict=True):
            self.open[row.group_id].members[row.rollout_id] = row
            self.leases.grant(assignment, worker_id)
        return assignments

    def end_attempt(
        self, lease: LiveLease, rollout: Rollout, *, state: LeaseState, recording: Recording | None = None
    ) -> ReportVerdict:
        """An attempt has ended as `rollout` says, and its lease in `state`: what the policies make of it."""
        row, outcome = self.row_of(lease), rollout.outcome
        may_retry = row.failures + 1 < self._settings.max_attempts
        kind = self.open[row.group_id].row.kind
        match consequence_of(outcome.kind, group=kind, may_retry=may_retry, settings=self._settings):
            case "retry":
                reason = f"{outcome.kind}: {outcome.error}; attempt {row.attempt + 1} follows"
                self.retry(lease, state, outcome=outcome, reason=reason, recording=recording)
                return ReportVerdict(accepted=True, reason=reason, retried=True)
            case "fail_group":
                failure = why_group_failed(rollout)
            case "finish":
                failure = None
        group = self.finish(row, rollout, lease=lease, lease_state=state, recording=recording, failure=failure)
        return ReportVerdict(accepted=True, group=group, reason=failure)

    def retry(
        self,
        lease: LiveLease,
        lease_state: LeaseState,
        *,
        outcome: Outcome | None = None,
        reason: str | None = None,
        recording: Recording | None = None,
    ) -> None:
        """A lease is over and its rollout waits for the next attempt; this one is spent unless it was released."""
        old = self.row_of(lease)
        failures = old.failures if lease_state == "released" else old.failures + 1
        row = msgspec.structs.replace(old, state="waiting", attempt=old.attempt + 1, failures=failures)
        result = None if outcome is None else _result_of(old, outcome, lease=lease, counted=False, reason=reason)
        with self.ledger.transaction():
            self.ledger.end_attempt(row, lease=(lease.lease_id, lease_state), result=result, recording=recording)
        group = self.open[row.group_id]
        group.members[row.rollout_id] = row
        self._end_lease(lease, lease_state)
        if outcome is not None and outcome.kind == "infrastructure":
            self.quarantine.lost(group.row, row.rollout_id, is_last=False)
        self.offers.add(group.row, [row])
        self.counters["attempts_retried"] += 1

    def finish(
        self,
        row: RolloutRow,
        rollout: Rollout,
        *,
        lease: LiveLease | None = None,
        lease_state: LeaseState = "reported",
        recording: Recording | None = None,
        failure: str | None = None,
    ) -> Group | None:
        """A rollout has its outcome, and the `lease` it ran under is over. Returns the group that this completes.

        `failure`: why its group fails with it.
        """
        row = msgspec.structs.replace(row, state="finished")
        group, outcome = self.open[row.group_id], rollout.outcome
        result = _result_of(row, outcome, lease=lease, counted=True)
        ended = None if lease is None else (lease.lease_id, lease_state)
        state = self._state_after(group, rollout, failure)
        deadly = self._deadly_errors(group.row, row, outcome)
        with self.ledger.transaction():
            result_id = self.ledger.end_attempt(row, lease=ended, result=result, recording=recording)
            if lease is None and recording is not None and self.ledger.session(recording.session_id):
                self.ledger.move_session(recording.session_id, "closed")
            if deadly:
                self._write_quarantine(group.row, row.rollout_id, deadly)
            if state != "open":
                self._write_close(group, state, failure, beside=row.rollout_id, ready_order=result_id)
        group.finish(row, rollout)
        if lease is not None:
            self._end_lease(lease, lease_state)
        self.counters["rollouts_finished"] += 1
        if group.row.kind == "eval" or self._settings.counts(outcome.kind):
            self.counters["rollouts_counted"] += 1  # what a stall guard takes for progress
        self.quarantine.forget([row.rollout_id])
        if outcome.kind != "infrastructure":
            self.quarantine.finished(group.row)
        if deadly:
            self.quarantine.add(group.row.task.task_id, deadly)
            self.counters["tasks_quarantined"] += 1
        return None if state == "open" else self._leave(group, state)

    def give_up(self, group: OpenGroup, state: GroupState, reason: str) -> GroupRow:
        """An open group, of which some members may have finished, has failed or is dropped; the others are cut."""
        with self.ledger.transaction():
            self._write_close(group, state, reason)
        self._leave(group, state)
        return msgspec.structs.replace(group.row, state=state, reason=reason)

    def drop_complete(self, group_id: str, reason: str) -> None:
        """A complete train group, taken or not, will not be used. Raises ValueError when it is not complete."""
        self.ledger.close_group(group_id, "dropped", reason=reason, old="complete")
        self.complete.remove("train", [group_id])
        self.counters["groups_dropped"] += 1

    def refuse(self, result: ResultRow, recording: Recording) -> None:
        """Keep a report that does not count."""
        lease = self.ledger.lease(result.lease_id or "")
        with self.ledger.transaction():
            has_content = bool(recording.turns or recording.segments)
            recording_id = self.ledger.add_recording(recording) if has_content else None
            self.ledger.add_result(result, recording_id=recording_id)
            if lease is not None and lease.state in ("released", "expired", "cut"):
                self.ledger.end_lease(lease.lease_id, "late")
        self.counters["results_refused"] += 1

    def recorded_group(self, group_id: str) -> Group:
        """A group that a window has consumed, from the ledger. Raises ValueError for any other."""
        row = self.ledger.group(group_id)
        if row is None or row.state != "consumed":
            raise ValueError(f"group {group_id!r} is {row.state if row else 'unknown'}, not consumed by a window")
        return restore_group(row, self.ledger.each_rollout(group_id), self._experiences_of).to_group()

    def _state_after(self, group: OpenGroup, rollout: Rollout, failure: str | None) -> GroupState:
        if failure is not None:
            return "failed"
        return "complete" if group.is_completed_by(rollout, self._settings) else "open"

    def _write_close(
        self,
        group: OpenGroup,
        state: GroupState,
        reason: str | None,
        *,
        beside: str | None = None,
        ready_order: int | None = None,
    ) -> None:
        """The end of an open group, in the ledger: all its members but `beside` that have not finished are cut."""
        left = group.unfinished(beside=beside)
        if left:
            self.ledger.put_rollouts([msgspec.structs.replace(row, state="cut") for row in left])
        for row in left:
            if row.state == "leased":
                self.ledger.end_lease(self.leases.of_rollout(row.rollout_id).lease_id, "cut")
        self.ledger.close_group(group.row.group_id, state, reason=reason, ready_order=ready_order)

    def _deadly_errors(self, group: GroupRow, row: RolloutRow, outcome: Outcome) -> list[str]:
        """The errors of a rollout that ends with `outcome`, if they condemn its task; else none."""
        if outcome.kind != "infrastructure":
            return []
        is_last = row.failures + 1 >= self._settings.max_attempts
        if not self.quarantine.lost(group, row.rollout_id, is_last=is_last):
            return []
        errors = [*self.ledger.attempt_errors(row.rollout_id), outcome.error or "no error was given"]
        # Fewer, when some of its attempts were spent on other outcomes that are retried.
        return errors if len(errors) >= self._settings.max_attempts else []

    def _write_quarantine(self, group: GroupRow, rollout_id: str, errors: list[str]) -> None:
        self.ledger.add_quarantine(group.task.task_id, errors)
        self.ledger.record_event("task_quarantined", {"task_id": group.task.task_id, "rollout_id": rollout_id})

    def _enter(self, group: OpenGroup) -> None:
        self.open[group.row.group_id] = group
        if group.row.key is not None:
            self.collecting[group.row.key] = group
        elif group.row.kind == "train":
            self.num_driven += 1
        self.quarantine.resume(row.rollout_id for row in group.members.values() if row.failures)
        self.offers.add(group.row, group.members.values())

    def _leave(self, group: OpenGroup, state: GroupState) -> Group | None:
        """The end of an open group, in memory."""
        left = group.unfinished()
        self.offers.withdraw(group.row, left)
        for lease in [self.leases.of_rollout(row.rollout_id) for row in left if row.state == "leased"]:
            self._end_lease(lease, "cut")
            self.cut.append(CutLease(lease_id=lease.lease_id, worker_id=lease.worker_id, session_id=lease.session_id))
        self.counters["rollouts_cut"] += len(left)
        self.quarantine.forget(row.rollout_id for row in left)
        del self.open[group.row.group_id]
        if group.row.key is not None:
            del self.collecting[group.row.key]
        elif group.row.kind == "train":
            self.num_driven -= 1
        self.counters["groups_completed" if state == "complete" else f"groups_{state}"] += 1
        if state != "complete":
            return None
        complete = group.to_group()
        self.complete.add(group.row.kind, complete)
        return complete

    def _end_lease(self, lease: LiveLease, state: LeaseState) -> None:
        self.leases.end(lease.lease_id)
        self.counters[f"leases_{state}"] += 1

    def _assignment(self, row: RolloutRow) -> Assignment:
        group = self.open[row.group_id].row
        return Assignment(
            # Random, so that a worker that outlived another run cannot name a lease of this one.
            lease_id=f"{row.rollout_id}.{row.attempt}-{secrets.token_hex(8)}",
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            attempt=row.attempt,
            task=group.task,
            kind=group.kind,
            member=row.member,
            position=group.position,
        )


def _result_of(
    row: RolloutRow, outcome: Outcome, *, lease: LiveLease | None, counted: bool, reason: str | None = None
) -> ResultRow:
    return ResultRow(
        outcome=outcome,
        counted=counted,
        reason=reason,
        lease_id=None if lease is None else lease.lease_id,
        rollout_id=row.rollout_id,
        attempt=row.attempt,
    )
