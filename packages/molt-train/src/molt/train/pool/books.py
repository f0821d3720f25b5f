"""The books of the pool: its state, kept twice, in the ledger and in memory.

Every change is written to the ledger first, as one transaction, and only then made in memory: a write that fails has
changed nothing on either side, and a process that dies between the two finds its memory again in the ledger.
"""

import secrets
from collections import Counter

import msgspec

from molt.train.pool.groups import ExperiencesOf, OpenGroup, restore_group, why_failed
from molt.train.pool.leases import Assignment, LeaseTable, LiveLease
from molt.train.pool.ledger import Ledger
from molt.train.pool.queues import CompleteGroups, OfferQueue
from molt.train.pool.rows import GroupKind, GroupRow, LeaseState, ResultRow, RolloutRow
from molt.train.records.recording import Recording
from molt.train.records.rollout import Group, Outcome, Rollout, Task


class Books:
    """Open groups, what waits for workers, live leases, and complete groups, rebuilt from `ledger`."""

    def __init__(self, ledger: Ledger, *, leases: LeaseTable, experiences_of: ExperiencesOf) -> None:
        self.ledger = ledger
        self.leases = leases
        self.offers = OfferQueue()
        self.complete = CompleteGroups()
        self.open: dict[str, OpenGroup] = {}
        """By group id."""
        self.collecting: dict[str, OpenGroup] = {}
        """The open groups of self-driven sessions, by key."""
        self.counters: Counter[str] = Counter()
        self._experiences_of = experiences_of
        self.counters["leases_lost_to_restart"] += ledger.recover()
        self._next_seq = ledger.next_seq()
        for row in ledger.live_groups():
            group = restore_group(row, ledger.rollouts(row.group_id), experiences_of)
            if row.state == "complete":
                self.complete.add(row.kind, group.to_group())
            else:
                self._enter(group)

    def row_of(self, lease: LiveLease) -> RolloutRow:
        """The rollout that a live lease is for."""
        return self.open[lease.group_id].members[lease.rollout_id]

    def open_group(
        self, task: Task, *, kind: GroupKind, size: int, position: int | None, key: str | None = None
    ) -> OpenGroup:
        """A new group, whose members wait for workers; with a `key`, one that has no members yet."""
        if size < 1:
            raise ValueError(f"group size is {size}; it must be at least 1")
        seq = self._next_seq
        group = OpenGroup(
            GroupRow(seq=seq, group_id=f"g{seq}", kind=kind, task=task, size=size, position=position, key=key)
        )
        if key is None:
            group.members.update((row.rollout_id, row) for row in map(group.new_member, range(size)))
        with self.ledger.transaction():
            self.ledger.add_group(group.row)
            self.ledger.put_rollouts(list(group.members.values()))
        self._next_seq = seq + 1
        self._enter(group)
        return group

    def grant(self, worker_id: str, capacity: int) -> list[Assignment]:
        """Lease what has waited longest, up to `capacity` rollouts."""
        offers = self.offers.oldest(capacity)
        if not offers:
            return []
        old = [self.open[offer.group_id].members[offer.rollout_id] for offer in offers]
        rows = [msgspec.structs.replace(row, state="leased") for row in old]
        assignments = [self._assignment(row) for row in rows]
        with self.ledger.transaction():
            self.ledger.put_rollouts(rows)
            self.ledger.add_leases(assignments, worker_id)
        self.offers.remove(len(offers))
        for row, assignment in zip(rows, assignments, strict=True):
            self.open[row.group_id].members[row.rollout_id] = row
            self.leases.grant(assignment, worker_id)
        return assignments

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
        self.leases.end(lease.lease_id)
        self.offers.add(group.row.seq, [row])
        self.counters[f"leases_{lease_state}"] += 1
        self.counters["attempts_retried"] += 1

    def finish(
        self,
        row: RolloutRow,
        rollout: Rollout,
        *,
        lease: LiveLease | None = None,
        lease_state: LeaseState = "reported",
        recording: Recording | None = None,
    ) -> Group | None:
        """A rollout has its outcome, and the `lease` it ran under is over. Returns the group that this completes."""
        row = msgspec.structs.replace(row, state="finished")
        group = self.open[row.group_id]
        result = _result_of(row, rollout.outcome, lease=lease, counted=True)
        ended = None if lease is None else (lease.lease_id, lease_state)
        is_last = group.num_missing == 1
        failure = why_failed(group.row, [*group.finished.values(), rollout]) if is_last else None
        with self.ledger.transaction():
            result_id = self.ledger.end_attempt(row, lease=ended, result=result, recording=recording)
            if is_last:
                state = "complete" if failure is None else "failed"
                self.ledger.close_group(row.group_id, state, reason=failure, ready_order=result_id)
        group.finish(row, rollout)
        if lease is not None:
            self.leases.end(lease.lease_id)
            self.counters[f"leases_{lease_state}"] += 1
        self.counters["rollouts_finished"] += 1
        return self._leave(group, is_failed=failure is not None) if is_last else None

    def refuse(self, result: ResultRow, recording: Recording) -> None:
        """Keep a report that does not count."""
        lease = self.ledger.lease(result.lease_id or "")
        with self.ledger.transaction():
            has_content = bool(recording.turns or recording.segments)
            recording_id = self.ledger.add_recording(recording) if has_content else None
            self.ledger.add_result(result, recording_id=recording_id)
            if lease is not None and lease.state in ("released", "expired"):
                self.ledger.end_lease(lease.lease_id, "late")
        self.counters["results_refused"] += 1

    def recorded_group(self, group_id: str) -> Group:
        """A group that a window has consumed, from the ledger. Raises ValueError for any other."""
        row = self.ledger.group(group_id)
        if row is None or row.state != "consumed":
            raise ValueError(f"group {group_id!r} is {row.state if row else 'unknown'}, not consumed by a window")
        return restore_group(row, self.ledger.rollouts(group_id), self._experiences_of).to_group()

    def _enter(self, group: OpenGroup) -> None:
        self.open[group.row.group_id] = group
        if group.row.key is not None:
            self.collecting[group.row.key] = group
        self.offers.add(group.row.seq, group.members.values())

    def _leave(self, group: OpenGroup, *, is_failed: bool) -> Group | None:
        del self.open[group.row.group_id]
        if group.row.key is not None:
            del self.collecting[group.row.key]
        self.counters["groups_failed" if is_failed else "groups_completed"] += 1
        if is_failed:
            return None
        complete = group.to_group()
        self.complete.add(group.row.kind, complete)
        return complete

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
