"""Live leases: who holds which attempt, and until when; and what is said about one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from molt.train.pool.rows import GroupKind
from molt.train.records.rollout import Group, Task


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A granted lease: what the worker is to run."""

    lease_id: str
    rollout_id: str
    group_id: str
    attempt: int
    task: Task
    kind: GroupKind
    member: int
    """The rollout's place in its group, from 0."""
    position: int | None
    """The data position of a train group's task; None for an evaluation."""


class ReportVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a report."""

    accepted: bool
    reason: str | None = None
    """Why it was refused; or, of an accepted one, why its rollout is tried again, takes no place in its group, or fails
    it."""
    group: Group | None = None
    """The group that the report completed."""
    retried: bool = False
    """Its rollout waits for another attempt."""


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that its worker let expire."""

    lease_id: str
    rollout_id: str
    attempt: int
    worker_id: str
    session_id: str | None
    retried: bool
    """False when the rollout has no further attempt, so that it has ended as `infrastructure`."""


class CutLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that ended because its group is complete, or was given up, without its rollout."""

    lease_id: str
    worker_id: str
    session_id: str | None


@dataclass(slots=True)
class LiveLease:
    """A lease that its worker still owns."""

    lease_id: str
    rollout_id: str
    group_id: str
    attempt: int
    worker_id: str
    granted: float
    """When it was granted, on the table's clock."""
    deadline: float
    """When it expires, on the same clock."""
    session_id: str | None = None


class LeaseTable:
    """The live leases, each with a deadline that its worker's heartbeats push back.

    `clock` gives seconds and must never go back: deadlines know nothing of the time of day.
    """

    def __init__(self, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._live: dict[str, LiveLease] = {}
        self._by_rollout: dict[str, LiveLease] = {}
        self._by_worker: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, assignment: Assignment, worker_id: str) -> None:
        """A new lease, alive for the time to live from now."""
        now = self._clock()
        lease = LiveLease(
            lease_id=assignment.lease_id,
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            worker_id=worker_id,
            granted=now,
            deadline=now + self.ttl_s,
        )
        self._live[lease.lease_id] = lease
        self._by_rollout[lease.rollout_id] = lease
        self._by_worker[worker_id] += 1

    def get(self, lease_id: str) -> LiveLease | None:
        """The lease; None when it is over, or never was."""
        return self._live.get(lease_id)

    def of_rollout(self, rollout_id: str) -> LiveLease:
        """The one lease under which a rollout runs."""
        return self._by_rollout[rollout_id]

    def end(self, lease_id: str) -> None:
        """The lease is over."""
        lease = self._live.pop(lease_id)
        del self._by_rollout[lease.rollout_id]
        self._by_worker[lease.worker_id] -= 1
        if not self._by_worker[lease.worker_id]:
            del self._by_worker[lease.worker_id]

    def renew(self, worker_id: str, lease_ids: Iterable[str]) -> list[str]:
        """Push back the deadlines of a worker's leases. Returns those of `lease_ids` that it does not own."""
        deadline = self._clock() + self.ttl_s
        lost: list[str] = []
        for lease_id in lease_ids:
            lease = self._live.get(lease_id)
            if lease is None or lease.worker_id != worker_id:
                lost.append(lease_id)
            else:
                lease.deadline = deadline
        return lost

    def overdue(self) -> list[LiveLease]:
        """The leases whose deadline has passed. They stay live until `end`."""
        now = self._clock()
        return [lease for lease in self._live.values() if lease.deadline <= now]

    def oldest_age_s(self) -> float | None:
        """Seconds since the lease that has been live longest was granted; None when there is none."""
        oldest = next(iter(self._live.values()), None)
        return None if oldest is None else self._clock() - oldest.granted

    @property
    def by_worker(self) -> Mapping[str, int]:
        """How many leases each worker holds; those with none are absent."""
        return self._by_worker
