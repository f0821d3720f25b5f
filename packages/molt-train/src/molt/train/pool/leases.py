"""Live leases: who holds which attempt, and until when; and what is said about one."""

from collections import Counter
from collections.abc import Callable, Iterable
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
    """Why it was refused; or, of an accepted one, why it does not finish its rollout."""
    group: Group | None = None
    """The group that the report completed."""


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that its worker let expire."""

    lease_id: str
    rollout_id: str
    attempt: int
    worker_id: str
    session_id: str | None
    retried: bool
    """False when the rollout's attempts are spent, so that it has ended as `infrastructure`."""


@dataclass(slots=True)
class LiveLease:
    """A lease that its worker still owns."""

    lease_id: str
    rollout_id: str
    group_id: str
    attempt: int
    worker_id: str
    deadline: float
    """When it expires, on the table's clock."""
    session_id: str | None = None


class LeaseTable:
    """The live leases, each with a deadline that its worker's heartbeats push back.

    `clock` gives seconds and must never go back: deadlines know nothing of the time of day.
    """

    def __init__(self, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._live: dict[str, LiveLease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, assignment: Assignment, worker_id: str) -> None:
        """A new lease, alive for the time to live from now."""
        self._live[assignment.lease_id] = LiveLease(
            lease_id=assignment.lease_id,
            rollout_id=assignment.rollout_id,
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            worker_id=worker_id,
            deadline=self._clock() + self.ttl_s,
        )

    def get(self, lease_id: str) -> LiveLease | None:
        """The lease; None when it is over, or never was."""
        return self._live.get(lease_id)

    def end(self, lease_id: str) -> None:
        """The lease is over."""
        del self._live[lease_id]

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

    def count_by_worker(self) -> dict[str, int]:
        """How many leases each worker holds."""
        return dict(Counter(lease.worker_id for lease in self._live.values()))
